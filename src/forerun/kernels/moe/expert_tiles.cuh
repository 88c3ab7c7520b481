// What the experts' persistent kernels for Hopper share: expert tiles, the claims of work tiles, and
// the counters by which CTAs tell each other that act is written.
#pragma once

#include "sm90.cuh"

__device__ inline int load_acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

__device__ inline void add_release(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Some pairs of one expert, from ExpertTiles.
struct alignas(8) ExpertTile {
  short expert, rows;
  int first;  // index into `pairs`
};

// Copies ExpertTiles into shared memory. Returns how many are in use. All threads of the CTA.
template <int THREADS>
__device__ int load_tiles(ExpertTile* list, const int* tiles, int max_tiles) {
  int used = 0;
  for (int first = 0; first < max_tiles; first += THREADS) {
    int i = first + (int)threadIdx.x, rows = 0;
    if (i < max_tiles) {
      rows = tiles[2 * max_tiles + i];
      list[i] = ExpertTile{(short)tiles[i], (short)rows, tiles[max_tiles + i]};
    }
    used += __syncthreads_count(rows > 0);
  }
  return used;
}

// Claimed work tiles that are kept: W's producer is ahead of all who read them by less than that.
constexpr int QUEUE = 32;

// The work tiles that this CTA claimed, in shared memory; a slot's mbarrier tells that it is written.
struct ClaimQueue {
  u32 barriers;
  volatile int* indices;
  __device__ void put(int i, int index) const {
    indices[i % QUEUE] = index;
    mbarrier_arrive(barriers + 8 * (i % QUEUE));
  }
  __device__ int get(int i) const {
    mbarrier_wait(barriers + 8 * (i % QUEUE), i / QUEUE % 2);
    return indices[i % QUEUE];
  }
};

// Waits until `count` parts of an expert tile's act are written. `threads` that use this barrier.
__device__ inline void wait_for_act(const int* progress, int tile, int count, int thread, int barrier,
                                    int threads) {
  if (thread == 0)
    while (load_acquire(progress + 2 + tile) < count) {
    }
  named_barrier_sync(barrier, threads);
}

// The last CTA that waits for act no more leaves `progress` zero. One thread.
__device__ inline void reset_progress(int* progress, int num_tiles) {
  __threadfence();
  if (atomicAdd(progress, 1) != (int)gridDim.x - 1) return;
  __threadfence();
  for (int i = 0; i < num_tiles + 2; i++) progress[i] = 0;
}
