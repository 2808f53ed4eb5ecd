// A crew of threads that stays awake between two layers of a token: the work of one layer is a fraction of a millisecond, and waking OpenMP's pool or
// handing work to a queue behind a lock costs a good part of that. Units are handed out by counting a number down; the caller works too.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace lab {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Crew {
 public:
  explicit Crew(int threads) {  // as many as work at a time, the caller among them
    for (int i = 1; i < threads; ++i) others_.emplace_back([this] { work(); });
  }

  ~Crew() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      ended_ = true;
    }
    wake_.notify_all();
    for (std::thread& other : others_) other.join();
  }

  int threads() const { return (int)others_.size() + 1; }

  // Calls body(unit) for every unit in [0, units), each once, on any thread; returns when all have returned. One caller at a time.
  template <class Body>
  void share(int64_t units, const Body& body) {
    if (units <= 1 || others_.empty()) {
      for (int64_t i = 0; i < units; ++i) body(i);
      return;
    }
    // Nobody is inside an earlier body here: its caller waited for every unit. A thread that still counts down finds nothing, or a unit of this one.
    body_ = &body;
    call_ = [](const void* that, int64_t unit) { (*(const Body*)that)(unit); };
    done_.store(0, std::memory_order_relaxed);
    left_.store(units);
    if (asleep_.load()) {
      { std::lock_guard<std::mutex> hold(lock_); }
      wake_.notify_all();
    }
    take();
    while (done_.load(std::memory_order_acquire) != units) pause();
  }

 private:
  static constexpr int64_t kAwakeNs = 1000000;  // a worker sleeps after so long without work: longer than the GPU needs from one layer's experts to the next

  bool take() {
    bool any = false;
    for (int64_t unit; (unit = left_.fetch_sub(1, std::memory_order_acquire) - 1) >= 0; any = true) {
      call_(body_, unit);
      done_.fetch_add(1, std::memory_order_release);
    }
    return any;
  }

  void work() {
    int64_t since = now_ns();
    for (;;) {
      if (left_.load(std::memory_order_relaxed) > 0 && take()) since = now_ns();
      for (int i = 0; i < 64 && left_.load(std::memory_order_relaxed) <= 0; ++i) pause();
      if (left_.load(std::memory_order_relaxed) > 0 || now_ns() - since < kAwakeNs) {
        if (ended_) return;
        continue;
      }
      std::unique_lock<std::mutex> hold(lock_);
      asleep_.fetch_add(1);
      wake_.wait(hold, [this] { return ended_ || left_.load() > 0; });
      asleep_.fetch_sub(1);
      if (ended_) return;
      since = now_ns();
    }
  }

  alignas(64) std::atomic<int64_t> left_{0};  // units not handed out; below zero once threads looked in vain
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> asleep_{0};
  const void* body_ = nullptr;
  void (*call_)(const void*, int64_t) = nullptr;
  std::atomic<bool> ended_{false};
  std::mutex lock_;
  std::condition_variable wake_;
  std::vector<std::thread> others_;
};

}  // namespace lab
