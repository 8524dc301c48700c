// Fibers: the threads of one CUDA block as stacks that take turns on one CPU thread, so that a thread can wait for
// others in the middle of a kernel. Each barrier is a switch to the scheduler, which resumes those whose barrier is
// complete.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

// Stores the callee-saved registers and the stack pointer of the running fiber in *from and continues `to`. ucontext
// would make a system call for each switch, which is six times slower.
extern "C" void san_shim_switch(void** from, void* to);
asm(R"(
.text
.weak san_shim_switch
.type san_shim_switch, @function
san_shim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size san_shim_switch, .-san_shim_switch
)");

namespace san::shim {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

class Context {
 public:
  // Makes the first switch to this context call `entry`, which must never return.
  void prepare(char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + kStackBytes) & ~uintptr_t(15));
    *--top = nullptr;  // as after a call, the stack pointer is 8 off a multiple of 16 when `entry` begins
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    pointer_ = top;
  }
  void switch_to(Context& next) { san_shim_switch(&pointer_, next.pointer_); }

 private:
  void* pointer_ = nullptr;
};

enum class State { kReady, kAtWarpBarrier, kAtBlockBarrier, kDone };

struct Fiber {
  Context context;
  State state;
  uint64_t exchanged[4];  // what it shows the other lanes of its warp
};

// Runs a kernel's body once per thread of a block.
class Scheduler {
 public:
  Scheduler(int threads, bool reverse)
      : fibers_(threads), stacks_(new char[threads * kStackBytes]), threads_(threads), reverse_(reverse) {}

  // Calls `on_resume` with the number of the thread that runs next.
  void run_block(const std::function<void()>& body, const std::function<void(int)>& on_resume) {
    body_ = &body, running_ = this;
    for (int thread = 0; thread < threads_; ++thread) {
      fibers_[thread].state = State::kReady;
      fibers_[thread].context.prepare(stacks_.get() + thread * kStackBytes, &enter);
    }
    do {
      for (int turn = 0; turn < threads_; ++turn) {
        current_ = reverse_ ? threads_ - 1 - turn : turn;
        if (fibers_[current_].state != State::kReady) continue;
        on_resume(current_);
        main_.switch_to(fibers_[current_].context);
      }
    } while (release_warps() || release_block());
    running_ = nullptr;
  }

  void wait(State barrier) {
    Fiber& fiber = fibers_[current_];
    fiber.state = barrier;
    fiber.context.switch_to(main_);
  }

  int lane() const { return current_ % kWarp; }
  Fiber& self() { return fibers_[current_]; }
  // A lane of the running fiber's warp; itself where the block has no such thread.
  Fiber& neighbour(int lane) {
    const int thread = current_ - current_ % kWarp + lane;
    return fibers_[thread < threads_ ? thread : current_];
  }

  static Scheduler& running() {
    if (running_ == nullptr) fail("a barrier or shuffle in a kernel that SAN_LAUNCH runs: use SAN_LAUNCH_SHARED");
    return *running_;
  }

 private:
  static void enter() {
    Scheduler& scheduler = *running_;
    (*scheduler.body_)();
    scheduler.wait(State::kDone);
  }

  // Releases the warps whose threads all wait for each other; finished threads do not count.
  bool release_warps() {
    bool moved = false;
    for (int first = 0; first < threads_; first += kWarp) {
      const int last = first + kWarp < threads_ ? first + kWarp : threads_;
      int waiting = 0, done = 0;
      for (int thread = first; thread < last; ++thread) {
        waiting += fibers_[thread].state == State::kAtWarpBarrier, done += fibers_[thread].state == State::kDone;
      }
      if (waiting == 0 || waiting + done < last - first) continue;
      for (int thread = first; thread < last; ++thread) {
        if (fibers_[thread].state == State::kAtWarpBarrier) fibers_[thread].state = State::kReady;
      }
      moved = true;
    }
    return moved;
  }

  // The same for the block. False when all are done; on a GPU, a thread that leaves before the others' barrier hangs
  // them.
  bool release_block() {
    int waiting = 0, done = 0;
    for (const Fiber& fiber : fibers_) {
      waiting += fiber.state == State::kAtBlockBarrier, done += fiber.state == State::kDone;
    }
    if (done == threads_) return false;
    if (waiting != threads_) fail("deadlock: some threads of a block wait for others that never come");
    for (Fiber& fiber : fibers_) fiber.state = State::kReady;
    return true;
  }

  [[noreturn]] static void fail(const char* why) {
    std::fprintf(stderr, "san shim: %s\n", why);
    std::abort();
  }

  static inline thread_local Scheduler* running_ = nullptr;
  std::vector<Fiber> fibers_;
  std::unique_ptr<char[]> stacks_;
  int threads_;
  bool reverse_;
  int current_ = 0;
  Context main_;
  const std::function<void()>* body_ = nullptr;
};

}  // namespace san::shim
