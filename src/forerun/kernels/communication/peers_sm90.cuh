// What ranks write to each other's memory, for the kernels of this folder. peers.py has the buffers.
#pragma once

#include "sm90.cuh"

// A line is 16 bytes: two words of data, each with the number of the call beside it. Whoever reads that number
// has the data, since 8 bytes are written at once: there is no fence and no flag to wait for besides.
__device__ inline void push(u64 line, u32 a, u32 b, u32 call) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(line), "r"(a), "r"(b), "r"(call)
               : "memory");
}

__device__ inline bool pull(u64 line, u32& a, u32& b, u32 call) {
  u32 first, second;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(first), "=r"(b), "=r"(second)
               : "l"(line)
               : "memory");
  return first == call && second == call;
}

__device__ inline u64 nanoseconds() {
  u64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Traps when a rank has waited for another one longer than `seconds`.
struct Deadline {
  int seconds, looks = 0;
  u64 end = 0;
  __device__ explicit Deadline(int seconds) : seconds(seconds) {}
  __device__ void check() {
    if (++looks % 1024) return;
    u64 now = nanoseconds();
    if (!end) end = now + seconds * 1000000000ull;
    if (now > end) __trap();
  }
};

// By one thread of each CTA, once all of its threads have read the number of the call: the last CTA ends it.
__device__ inline void end_call(u32* state, u32 call) {
  if (atomicAdd(state + 1, 1) == gridDim.x - 1) {
    state[1] = 0;
    *(volatile u32*)state = call;
  }
}
