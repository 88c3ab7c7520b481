// Threads for the kernels: work is cut into items, and whichever thread is free takes the next.
//
// Threads of our own and not OpenMP: PyTorch brings an OpenMP runtime, and two of them would spin
// against each other; Apple's compiler has none. The caller takes items too and waits only for
// threads that have joined, so a thread that has lost its core delays nothing but its own item.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace forerun {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
   public:
    static ThreadPool& get() {
        // Never destroyed: its threads sleep until the process ends.
        static ThreadPool* pool = new ThreadPool;
        return *pool;
    }

    using Item = void (*)(void* context, int64_t item);

    // Runs item(context, i) for 0 <= i < items, on at most `threads` threads.
    void run(Item item, void* context, int64_t items, int threads) {
        std::unique_lock<std::mutex> own(busy_, std::try_to_lock);
        if (!own.owns_lock()) {  // another engine uses the threads
            for (int64_t i = 0; i < items; i++) item(context, i);
            return;
        }
        grow(threads - 1);
        item_ = item, context_ = context, items_ = items;
        next_.store(0), places_.store(threads - 1);
        const uint64_t open = job_.load() + 1;  // odd: there is work
        job_.store(open);
        for (int i = 0; i < threads - 1; i++) workers_[i]->wake();
        take_items();
        job_.store(open + 1);
        for (int spins = 0; working_.load() > 0; spins++) {
            if (spins < 1000)
                pause_cpu();
            else
                std::this_thread::yield();
        }
    }

   private:
    void take_items() {
        for (int64_t i; (i = next_.fetch_add(1)) < items_;) item_(context_, i);
    }

    // Each sleeps on its own: a job wakes as many as it has threads for, however many there are.
    struct Worker {
        std::mutex sleep;
        std::condition_variable woken;
        std::atomic<bool> asleep{false};

        void wake() {
            if (!asleep.load()) return;
            { std::lock_guard<std::mutex> lock(sleep); }
            woken.notify_one();
        }
    };

    void grow(int count) {
        while (int(workers_.size()) < count) {
            workers_.push_back(std::make_unique<Worker>());
            std::thread(&ThreadPool::work, this, workers_.back().get()).detach();
        }
    }

    void work(Worker* worker) {
        uint64_t seen = 0;
        for (;;) {
            const uint64_t job = wait_for_job(*worker, seen);
            // The caller closes the job before it looks at `working_`: either it waits for this
            // thread, or this thread sees that the job is closed.
            working_.fetch_add(1);
            if (job_.load() == job && places_.fetch_sub(1) > 0) take_items();
            working_.fetch_sub(1);
            seen = job;
        }
    }

    // Spins for a while, since the next kernel of a step follows within microseconds; then sleeps.
    uint64_t wait_for_job(Worker& worker, uint64_t seen) {
        const auto open = [&](uint64_t job) { return job % 2 == 1 && job != seen; };
        uint64_t job;
        const auto begin = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 64; i++) {
                if (open(job = job_.load())) return job;
                pause_cpu();
            }
        } while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(100));
        std::unique_lock<std::mutex> lock(worker.sleep);
        worker.asleep.store(true);
        worker.woken.wait(lock, [&] { return open(job = job_.load()); });
        worker.asleep.store(false);
        return job;
    }

    std::mutex busy_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<uint64_t> job_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> places_{0}, working_{0};
    Item item_ = nullptr;
    void* context_ = nullptr;
    int64_t items_ = 0;
};

// body(i) for 0 <= i < items; which thread computes an item must not change its result.
template <class Body>
void parallel_for(int64_t items, int threads, Body&& body) {
    if (threads <= 1 || items <= 1) {
        for (int64_t i = 0; i < items; i++) body(i);
        return;
    }
    using Function = std::remove_reference_t<Body>;
    const auto item = [](void* context, int64_t i) { (*static_cast<Function*>(context))(i); };
    ThreadPool::get().run(item, &body, items, threads);
}

}  // namespace forerun
