// Persistent worker threads that run one step together: spin briefly for the next one, then park.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pagoda {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
    for (int i = 1; i < num_threads_; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~ThreadPool() {
    stop_ = true;
    announce();
    for (auto& worker : workers_) worker.join();
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs job(thread index) on every thread, the caller being thread 0, and returns when all are done.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    num_running_.store(num_threads_, std::memory_order_relaxed);
    announce();
    job(0);
    if (num_running_.fetch_sub(1, std::memory_order_acq_rel) == 1) return;
    wait_until([this] { return num_running_.load(std::memory_order_acquire) == 0; });
  }

  // Inside a job: returns when every thread has arrived. Sense-reversing, so it can be used again at once.
  void barrier() {
    if (num_threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      num_arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait_until([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  static constexpr int SPINS_BEFORE_YIELD = 4000;   // some 50 microseconds: more than a stage's imbalance
  static constexpr int SPINS_BEFORE_PARK = 8000;    // some 100 microseconds: the gap between decode steps

  template <class Ready>
  static void wait_until(Ready ready) {
    for (int spin = 0; !ready(); spin++) {
      if (spin < SPINS_BEFORE_YIELD) cpu_relax();
      else std::this_thread::yield();  // someone else needs the core: an oversubscribed machine must not stall
    }
  }

  void announce() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }

  void work(int index) {
    unsigned seen = 0;
    for (;;) {
      for (int spin = 0; spin < SPINS_BEFORE_PARK && generation_.load(std::memory_order_acquire) == seen; spin++) cpu_relax();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      }
      seen++;
      if (stop_) return;
      (*job_)(index);
      num_running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  const int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<int> num_running_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

}  // namespace pagoda
