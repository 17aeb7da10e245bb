// How work is counted and cut into tasks, for code that is not built once for each instruction set.
#pragma once
#include <cstddef>

namespace pagoda {

constexpr int TASKS_PER_THREAD = 6;  // enough to even out threads, few enough to keep the counters cool

constexpr size_t at(int i) { return static_cast<size_t>(i); }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace pagoda
