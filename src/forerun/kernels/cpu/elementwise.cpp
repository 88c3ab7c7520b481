// RMSNorm, and what lies between a QKV GEMM and the K/V pool: QK-norm, RoPE and the write.
#include "norm.h"
#include "parallel.h"

namespace forerun {

constexpr int64_t MAX_DIM = 1024;  // of a head
constexpr int64_t SERIAL_TOKENS = 64;  // below, waking other threads costs more than it gains

inline int threads_for(int64_t tokens, int threads) { return tokens < SERIAL_TOKENS ? 1 : threads; }

template <class T>
void rms_norm(const void* x, const void* residual, const void* weight, int64_t rows, int64_t size,
              float eps, void* total, void* out, int threads) {
    parallel_for(rows, threads_for(rows, threads), [&](int64_t r) {
        const T* row = static_cast<const T*>(x) + r * size;
        if (residual != nullptr) {
            const T* other = static_cast<const T*>(residual) + r * size;
            T* sum = static_cast<T*>(total) + r * size;
            for (int64_t i = 0; i < size; i++)
                sum[i] = from_float<T>(to_float(other[i]) + to_float(row[i]));
            row = sum;
        }
        rms_norm_row(row, static_cast<const T*>(weight), size, eps,
                     static_cast<T*>(out) + r * size);
    });
}

// In Python: `_RopeWrite` in attention.py.
struct RopeWrite {
    const void* x;        // [T, row_stride]: q heads, then k of all layers, then v of all layers
    const void* q_norm;   // [D] or null
    const void* k_norm;   // [layers, D] or null
    const void* table;    // [P, 2, D]: cos, signed sin
    const void* positions;  // [T]
    const int64_t* kv_slots;  // [T]
    void* q;              // [T, heads, D]
    void* k_pool;         // [layers, slots, kv_heads, D]
    void* v_pool;
    int64_t tokens, row_stride, heads, kv_heads, layers, dim, layer_stride;
    float eps;
    int32_t wide_positions;  // int64, else int32
    int32_t bfloat16_x, bfloat16_pool;
};

// A head, normed and rotated, in float32.
template <class T>
inline void norm_rope(const T* x, const T* norm, const T* table, int64_t dim, float eps,
                      float* out) {
    float normed[MAX_DIM];
    for (int64_t i = 0; i < dim; i++) normed[i] = to_float(x[i]);
    if (norm != nullptr) {
        const float scale = inverse_rms(x, dim, eps);
        for (int64_t i = 0; i < dim; i++)
            normed[i] = to_float(from_float<T>(normed[i] * scale * to_float(norm[i])));
    }
    const int64_t half = dim / 2;
    const T *cos = table, *sin = table + dim;
    for (int64_t i = 0; i < half; i++) {
        out[i] = normed[i] * to_float(cos[i]) + normed[i + half] * to_float(sin[i]);
        out[i + half] =
            normed[i + half] * to_float(cos[i + half]) + normed[i] * to_float(sin[i + half]);
    }
}

template <class T, class P>
void rope_write(const RopeWrite& a, int threads) {
    parallel_for(a.tokens, threads_for(a.tokens, threads), [&](int64_t t) {
        const int64_t dim = a.dim, heads_kv = a.layers * a.kv_heads;
        const int64_t position = a.wide_positions
                                     ? static_cast<const int64_t*>(a.positions)[t]
                                     : static_cast<const int32_t*>(a.positions)[t];
        const T* x = static_cast<const T*>(a.x) + t * a.row_stride;
        const T* table = static_cast<const T*>(a.table) + position * 2 * dim;
        float head[MAX_DIM];
        for (int64_t h = 0; h < a.heads; h++, x += dim) {
            norm_rope(x, static_cast<const T*>(a.q_norm), table, dim, a.eps, head);
            T* q = static_cast<T*>(a.q) + (t * a.heads + h) * dim;
            for (int64_t i = 0; i < dim; i++) q[i] = from_float<T>(head[i]);
        }
        const T* v = x + heads_kv * dim;
        for (int64_t h = 0; h < heads_kv; h++, x += dim, v += dim) {
            const int64_t layer = h / a.kv_heads;
            const int64_t at = layer * a.layer_stride +
                               (a.kv_slots[t] * a.kv_heads + h % a.kv_heads) * dim;
            const T* norm = static_cast<const T*>(a.k_norm);
            norm_rope(x, norm == nullptr ? norm : norm + layer * dim, table, dim, a.eps, head);
            P* k_to = static_cast<P*>(a.k_pool) + at;
            P* v_to = static_cast<P*>(a.v_pool) + at;
            for (int64_t i = 0; i < dim; i++) {
                k_to[i] = from_float<P>(to_float(from_float<T>(head[i])));
                v_to[i] = from_float<P>(to_float(v[i]));
            }
        }
    });
}

}  // namespace forerun

using namespace forerun;

#pragma GCC visibility push(default)
extern "C" {

// x, residual [rows, size] -> total = residual + x and out = RMSNorm(total); without residual
// out = RMSNorm(x).
void forerun_rms_norm(const void* x, const void* residual, const void* weight, int64_t rows,
                      int64_t size, float eps, void* total, void* out, int32_t is_bfloat16,
                      int32_t threads) {
    (is_bfloat16 ? rms_norm<BFloat16> : rms_norm<float>)(x, residual, weight, rows, size, eps,
                                                         total, out, threads);
}

void forerun_rope_write(const RopeWrite* a, int32_t threads) {
    if (a->bfloat16_x)
        (a->bfloat16_pool ? rope_write<BFloat16, BFloat16> : rope_write<BFloat16, float>)(*a,
                                                                                         threads);
    else
        (a->bfloat16_pool ? rope_write<float, BFloat16> : rope_write<float, float>)(*a, threads);
}

}  // extern "C"
#pragma GCC visibility pop
