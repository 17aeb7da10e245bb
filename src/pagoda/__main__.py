"""`python -m pagoda` is the command `pagoda`."""

import sys

from pagoda.cli import main

sys.exit(main())
