// Recorded calls of the kernels, made again by one call from Python (graph.py).
#include <cstdint>
#include <cstring>

namespace {

using In = const void*;
using Out = void*;

// In the order of `SIGNATURES` in library.py.
enum Kernel : int64_t {
    GEMM, GEMM_ADD_NORM, GEMM_SILU_MUL, GEMM_ARGMAX, RMS_NORM, ROPE_WRITE, ATTENTION, TAKE_ROWS,
    DECODE_INPUTS, VERIFY_INPUTS, ACCEPT_COMMIT, RING_WRITE, TAKE_PACKED_ROWS, KV_SLOTS,
    COPY_ROWS, RING_READ, PROMPT_LOOKUP, SUFFIX_APPEND, SUFFIX_DRAFTS, EXPERTS,
    CAUSAL_CONV, GATED_DELTA, GATED_NORM, APPLY, LOG_SUM_EXP, HEAD_GEMM, SURVIVAL, LEARN, ALLOCATE,
    PACK_TOKENS, ADD_ARGMAX, COUNT_RELIABILITY, CONFIDENCES,
};

// In Python: `_Call` in graph.py. Pointers and integers as they are, floats in the low half.
struct Call {
    int64_t kernel;
    int64_t words[9];

    In in(int i) const { return reinterpret_cast<In>(words[i]); }
    Out out(int i) const { return reinterpret_cast<Out>(words[i]); }
    float real(int i) const {
        float value;
        std::memcpy(&value, &words[i], sizeof value);
        return value;
    }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void forerun_announce_gemm(In);
void forerun_gemm(In, In, int64_t, Out, int32_t);
void forerun_gemm_add_norm(In, In, int64_t, In, In, float, Out, Out, int32_t);
void forerun_gemm_silu_mul(In, In, int64_t, Out, int32_t);
void forerun_gemm_argmax(In, In, int64_t, Out, int32_t);
void forerun_rms_norm(In, In, In, int64_t, int64_t, float, Out, Out, int32_t, int32_t);
void forerun_rope_write(In, int32_t);
void forerun_attention(In, int32_t);
void forerun_take_rows(In, In, int64_t, int64_t, int64_t, Out, int32_t);
void forerun_decode_inputs(In, int32_t);
void forerun_verify_inputs(In, int32_t);
void forerun_accept_commit(In, int32_t);
void forerun_ring_write(In, int32_t);
void forerun_take_packed_rows(In, In, int64_t, Out, int32_t);
void forerun_kv_slots(In, int32_t);
void forerun_ring_read(In, int32_t);
void forerun_prompt_lookup(In, int32_t);
void forerun_suffix_append(In, int32_t);
void forerun_suffix_drafts(In, int32_t);
void forerun_experts(In, int32_t);
void forerun_causal_conv(In, int32_t);
void forerun_gated_delta(In, int32_t);
void forerun_gated_norm(In, In, In, In, float, Out, int32_t, int32_t);
void forerun_apply(int32_t, In, int64_t, Out, int32_t, int32_t);
void forerun_log_sum_exp(In, int64_t, int64_t, Out, int32_t, int32_t);
void forerun_head_gemm(In, int32_t);
void forerun_survival(In, int32_t);
void forerun_learn(In, int32_t);
void forerun_allocate(In, int32_t);
void forerun_pack_tokens(In, int32_t);
void forerun_count_reliability(In, int32_t);
void forerun_confidences(In, int32_t);
void forerun_copy_rows(In, int64_t, int64_t, int64_t, Out, int64_t, int32_t);
void forerun_add_argmax(In, int64_t, In, int64_t, int64_t, int64_t, Out, int32_t, int32_t);

static void run(const Call& c, int32_t threads) {
    const int64_t* w = c.words;
    switch (Kernel(c.kernel)) {
        case GEMM: return forerun_gemm(c.in(0), c.in(1), w[2], c.out(3), threads);
        case GEMM_ADD_NORM:
            return forerun_gemm_add_norm(c.in(0), c.in(1), w[2], c.in(3), c.in(4), c.real(5),
                                         c.out(6), c.out(7), threads);
        case GEMM_SILU_MUL:
            return forerun_gemm_silu_mul(c.in(0), c.in(1), w[2], c.out(3), threads);
        case GEMM_ARGMAX: return forerun_gemm_argmax(c.in(0), c.in(1), w[2], c.out(3), threads);
        case RMS_NORM:
            return forerun_rms_norm(c.in(0), c.in(1), c.in(2), w[3], w[4], c.real(5), c.out(6),
                                    c.out(7), int32_t(w[8]), threads);
        case ROPE_WRITE: return forerun_rope_write(c.in(0), threads);
        case ATTENTION: return forerun_attention(c.in(0), threads);
        case TAKE_ROWS:
            return forerun_take_rows(c.in(0), c.in(1), w[2], w[3], w[4], c.out(5), threads);
        case DECODE_INPUTS: return forerun_decode_inputs(c.in(0), threads);
        case VERIFY_INPUTS: return forerun_verify_inputs(c.in(0), threads);
        case ACCEPT_COMMIT: return forerun_accept_commit(c.in(0), threads);
        case RING_WRITE: return forerun_ring_write(c.in(0), threads);
        case TAKE_PACKED_ROWS:
            return forerun_take_packed_rows(c.in(0), c.in(1), w[2], c.out(3), threads);
        case KV_SLOTS: return forerun_kv_slots(c.in(0), threads);
        case RING_READ: return forerun_ring_read(c.in(0), threads);
        case PROMPT_LOOKUP: return forerun_prompt_lookup(c.in(0), threads);
        case SUFFIX_APPEND: return forerun_suffix_append(c.in(0), threads);
        case SUFFIX_DRAFTS: return forerun_suffix_drafts(c.in(0), threads);
        case EXPERTS: return forerun_experts(c.in(0), threads);
        case CAUSAL_CONV: return forerun_causal_conv(c.in(0), threads);
        case GATED_DELTA: return forerun_gated_delta(c.in(0), threads);
        case GATED_NORM:
            return forerun_gated_norm(c.in(0), c.in(1), c.in(2), c.in(3), c.real(4), c.out(5),
                                      int32_t(w[6]), threads);
        case APPLY:
            return forerun_apply(int32_t(w[0]), c.in(1), w[2], c.out(3), int32_t(w[4]), threads);
        case LOG_SUM_EXP:
            return forerun_log_sum_exp(c.in(0), w[1], w[2], c.out(3), int32_t(w[4]), threads);
        case HEAD_GEMM: return forerun_head_gemm(c.in(0), threads);
        case SURVIVAL: return forerun_survival(c.in(0), threads);
        case LEARN: return forerun_learn(c.in(0), threads);
        case ALLOCATE: return forerun_allocate(c.in(0), threads);
        case PACK_TOKENS: return forerun_pack_tokens(c.in(0), threads);
        case ADD_ARGMAX:
            return forerun_add_argmax(c.in(0), w[1], c.in(2), w[3], w[4], w[5], c.out(6),
                                      int32_t(w[7]), threads);
        case COUNT_RELIABILITY: return forerun_count_reliability(c.in(0), threads);
        case CONFIDENCES: return forerun_confidences(c.in(0), threads);
        case COPY_ROWS:
            return forerun_copy_rows(c.in(0), w[1], w[2], w[3], c.out(4), w[5], threads);
    }
}

void forerun_run(const Call* calls, int64_t count, int32_t threads) {
    for (int64_t i = 0; i < count; i++) {
        if (calls[i].kernel <= GEMM_ARGMAX) {
            int64_t next = i + 1;
            while (next < count && calls[next].kernel > GEMM_ARGMAX) next++;
            forerun_announce_gemm(next < count ? calls[next].in(0) : nullptr);
        }
        run(calls[i], threads);
    }
    forerun_announce_gemm(nullptr);
}

}  // extern "C"
#pragma GCC visibility pop
