// A few numbers of every rank, gathered or their maxima: a thread per line of two words. exchange_sm90.py
// compiles and launches it, and puts its configuration in front of this file, as macros.

#ifndef RANKS  // opened in an IDE: one consistent configuration
#define RANKS 2
#define RANK 0  // this one
#define GATHER 0
#define MAX_OF_FLOATS 1
#define MAX_OF_INT64 2
#define WHAT GATHER
#define THREADS 256
#define RANK_BYTES 2097152  // of one rank in another one's buffer
#endif

#include "peers_sm90.cuh"
#include "sm90.cuh"

struct Words {
  u32 a, b;
  __device__ void take_larger(Words other) {
#if WHAT == MAX_OF_FLOATS
    a = __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(other.a)));
    b = __float_as_uint(fmaxf(__uint_as_float(b), __uint_as_float(other.b)));
#else
    long long mine = (long long)((u64)b << 32 | a), theirs = (long long)((u64)other.b << 32 | other.a);
    if (theirs > mine) *this = other;
#endif
  }
};

// x: `words` of this rank, in rows of `row_words`. out: rows of RANKS * row_words, or the maxima of the words.
// buffers: the address of every rank's buffer, [2, RANKS] lines. state: the number of the last call, and CTAs
// that are done.
extern "C" __global__ void __launch_bounds__(THREADS)
exchange_sm90_kernel(const u32* x, u32* out, const u64* buffers, u32* state, int words, int row_words, int seconds) {
  griddepcontrol_launch_dependents();
  int at = 2 * (blockIdx.x * THREADS + threadIdx.x);
  griddepcontrol_wait();
  u32 call = *(volatile u32*)state + 1;
  if (at < words) {
    bool whole = at + 1 < words;
    Words own = {x[at], whole ? x[at + 1] : 0};
    u64 offset = (u64)(call % 2) * RANKS * RANK_BYTES + (u64)at * 8;
#pragma unroll
    for (int i = 1; i < RANKS; i++)
      push(buffers[(RANK + i) % RANKS] + offset + (u64)RANK * RANK_BYTES, own.a, own.b, call);
    u64 mine = buffers[RANK] + offset;
#if WHAT != GATHER
    Words most = own;
#endif
#pragma unroll
    for (int i = 0; i < RANKS; i++) {
      Words each = own;
      Deadline deadline(seconds);
      if (i != RANK)
        while (!pull(mine + (u64)i * RANK_BYTES, each.a, each.b, call)) deadline.check();
#if WHAT == GATHER
      int first = (at / row_words * RANKS + i) * row_words + at % row_words;
      int second = ((at + 1) / row_words * RANKS + i) * row_words + (at + 1) % row_words;
      out[first] = each.a;
      if (whole) out[second] = each.b;
#else
      most.take_larger(each);
#endif
    }
#if WHAT != GATHER
    out[at] = most.a;
    if (whole) out[at + 1] = most.b;
#endif
  }
  __syncthreads();  // all threads have read the number of the call
  if (threadIdx.x == 0) end_call(state, call);
}
