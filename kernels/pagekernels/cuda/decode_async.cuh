// Asynchronous copies into shared memory, and the barriers that tell of their arrival.
#pragma once
#include "decode_config.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
  return passed != 0;
}

// The same without ever being suspended.
__device__ __forceinline__ bool barrier_tested(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return passed != 0;
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

// Where `arrivals` lanes have said that their copies are on the way, or one lane how many bytes are.
constexpr int kCopyArrivals = kBulk ? 1 : 33;

// K and V are read once: as the first to be evicted they leave in L2 what else is there, which need not be written back
// then. Measured on an H200: 3 us less at 134 MB, as good at 268 MB, 7 us more at 537 MB. Where that does not pay there
// is no hint at all: a policy of evict_normal takes 9 us more than none (decode_h200.md).
constexpr int kStreamedTiles = (384 << 20) / (2 * kTileBytes);

#if BULK
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                   shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ uint64_t streamed_policy() {
  uint64_t policy = 0;
#if KV_HINT
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Results, which the model's next projection reads: as the last to be evicted they stay in L2 while K and V pass through
// it. Measured on an H200 at 537 MB: 2.4 us less with 256 sequences, 1.2 with 128, as good elsewhere (decode_h200.md).
template <int kWords>
__device__ __forceinline__ void store_kept(void* to, const uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2, "");
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  if constexpr (kWords == 1)
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(to), "r"(words[0]), "l"(policy) : "memory");
  else
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "l"(policy) : "memory");
}

// One thread: `bytes`, a multiple of 16. `policy`: how L2 keeps them, 0: as it likes.
__device__ __forceinline__ void copy_run(void* to, const void* from, uint32_t bytes, uint64_t* barrier,
                                         uint64_t policy) {
  if (policy)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#else
__device__ __forceinline__ uint64_t streamed_policy() { return 0; }

template <int kWords>
__device__ __forceinline__ void store_kept(void* to, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 1)
    *static_cast<uint32_t*>(to) = words[0];
  else
    *static_cast<uint2*>(to) = {words[0], words[1]};
}

// A warp: `bytes`, 16 a lane and turn.
__device__ __forceinline__ void copy_run(void* to, const void* from, uint32_t bytes, int lane) {
  const uint32_t target = shared_address(to);
  const char* source = static_cast<const char*>(from);
  for (uint32_t at = lane * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + at), "l"(source + at) : "memory");
}

// All lanes: the barrier hears of this lane when its copies have arrived.
__device__ __forceinline__ void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
#endif

__device__ __forceinline__ void barriers_init(Shared& shared) {
  for (int i = 0; i < kSlots; ++i) {
    barrier_init(&shared.full[i], kCopyArrivals);
    barrier_init(&shared.empty[i], kQueryTiles);
  }
  for (int i = 0; i < kSegments; ++i) {
    barrier_init(&shared.segment_full[i], kCopyArrivals);
    barrier_init(&shared.segment_empty[i], kWarps);
  }
  shared.pending_pairs = 0;
#if BULK
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Barriers 1 and 2 of the CTA: the computing warps among themselves, and everybody once at the start.
__device__ __forceinline__ void sync_computing() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }
__device__ __forceinline__ void arrive_start() { asm volatile("bar.arrive 2, %0;" ::"n"(kThreads + 32) : "memory"); }
__device__ __forceinline__ void sync_start() { asm volatile("bar.sync 2, %0;" ::"n"(kThreads + 32) : "memory"); }

// threadIdx.x, read anew: what follows from it is then computed where it is used, and holds no register in the loop
// over tiles, which has none to spare.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
