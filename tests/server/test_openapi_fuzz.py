"""No call that the OpenAPI description allows makes the server fail: pip install schemathesis"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.servers import byte_tokenizer, parrot, serving
from tests.server.test_tools import HERMES_TEMPLATE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which(
        "schemathesis"
    )
    if command is None:
        pytest.skip("schemathesis is not installed")
    tokenizer = byte_tokenizer().with_chat_template(HERMES_TEMPLATE)
    with serving(parrot, num_blocks=400, max_num_seqs=16, tokenizer=tokenizer) as server:
        arguments = ["--checks", "not_a_server_error", "--max-examples", "60", "--seed", "1"]
        found = subprocess.run(
            [command, "run", f"{server.url}/openapi.json", *arguments, "--request-timeout", "60"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
        assert server.http.get("/health").status_code == 200
        assert server.metric("pagoda_requests_finished_total", finish_reason="error") == 0
