// RMSNorm, functions of single values, log-sum-exp and the argmax of a sum; and what lies between a
// QKV GEMM and the K/V pool: QK-norm, RoPE and the write.
#include <algorithm>

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

enum Function : int32_t { SIGMOID = 0, TANH = 1, GELU_TANH = 2 };

// f(x) of any number of values. A value's result does not depend on its place.
template <class T>
void apply(int32_t function, const T* x, int64_t size, T* out, int threads) {
    constexpr int64_t BLOCK = 4096;
    const auto f = [&](Vec v) {
        return function == SIGMOID ? sigmoid_vec(v)
               : function == TANH  ? tanh_vec(v)
                                   : gelu_tanh_vec(v);
    };
    parallel_for((size + BLOCK - 1) / BLOCK, size < 4 * BLOCK ? 1 : threads, [&](int64_t b) {
        int64_t i = b * BLOCK;
        const int64_t end = std::min(size, i + BLOCK);
        for (; i + LANES <= end; i += LANES) store_floats(out + i, f(load_floats(x + i)));
        for (; i < end; i++) out[i] = from_float<T>(f(broadcast(to_float(x[i])))[0]);
    });
}

template <class T>
bool has_nan(const T* x, int64_t size) {
    return std::any_of(x, x + size, [](T value) { return to_float(value) != to_float(value); });
}

// log of the sum of exp(x) of a row; NaN if it has a NaN or +inf, -inf if it has nothing else.
template <class T>
float log_sum_exp(const T* x, int64_t size) {
    Vec most = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Vec value = load_floats(x + i);
        most = value > most ? value : most;
    }
    float largest = max_lanes(most);
    for (; i < size; i++) largest = std::max(largest, to_float(x[i]));
    if (std::isinf(largest)) return largest < 0 && !has_nan(x, size) ? largest : NAN;
    double sum = 0;
    for (int64_t block = 0; block < size; block += 1024) {  // so that few are added in float32
        const int64_t end = std::min(size, block + 1024);
        Vec sums = {};
        for (i = block; i + LANES <= end; i += LANES) sums += exp_vec(load_floats(x + i) - largest);
        float rest = sum_lanes(sums);
        for (; i < end; i++) rest += exp_one(to_float(x[i]) - largest);
        sum += double(rest);
    }
    return largest + float(std::log(sum));
}

// The index of the largest x + y, the lowest of equals; 0 if all are NaN or -inf.
template <class T>
int64_t add_argmax(const T* x, const T* y, int64_t size) {
    constexpr int64_t BLOCK = 256;
    float best = -INFINITY;
    int64_t at = 0;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const int64_t end = std::min(size, begin + BLOCK);
        Vec most = broadcast(-INFINITY);
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            const Vec sum = load_floats(x + i) + load_floats(y + i);
            most = sum > most ? sum : most;
        }
        float largest = max_lanes(most);
        for (; i < end; i++) largest = std::fmax(largest, to_float(x[i]) + to_float(y[i]));
        if (!(largest > best)) continue;
        best = largest;
        for (at = begin; to_float(x[at]) + to_float(y[at]) != best;) at++;
    }
    return at;
}

// The sum of x * y.
template <class T>
float dot(const T* x, const T* y, int64_t size) {
    Vec sums = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        sums = mul_add(load_floats(x + i), load_floats(y + i), sums);
    float sum = sum_lanes(sums);
    for (; i < size; i++) sum += to_float(x[i]) * to_float(y[i]);
    return sum;
}

// In Python: `confidences` in functions.py.
struct Confidences {
    const void* hidden;  // [B, D, size]
    const void* more;    // [B, D, more_size]
    const void* weight;  // [size + more_size]
    const void* bias;    // [1]
    float* out;          // [B, D]
    int64_t batch, depth, size, more_size, batch_stride, row_stride, bfloat16;
};

template <class T>
void confidences(const Confidences& a) {
    const auto *hidden = static_cast<const T*>(a.hidden), *more = static_cast<const T*>(a.more);
    const auto* weight = static_cast<const T*>(a.weight);
    const float bias = to_float(*static_cast<const T*>(a.bias));
    for (int64_t at = 0; at < a.batch * a.depth; at++) {
        const int64_t row = at / a.depth * a.batch_stride + at % a.depth * a.row_stride;
        const float score = dot(hidden + row, weight, a.size) +
                            dot(more + at * a.more_size, weight + a.size, a.more_size) + bias;
        a.out[at] = sigmoid_vec(broadcast(score))[0];
    }
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

void forerun_apply(int32_t function, const void* x, int64_t size, void* out, int32_t is_bfloat16,
                   int32_t threads) {
    if (is_bfloat16)
        apply(function, static_cast<const BFloat16*>(x), size, static_cast<BFloat16*>(out), threads);
    else
        apply(function, static_cast<const float*>(x), size, static_cast<float*>(out), threads);
}

void forerun_log_sum_exp(const void* x, int64_t rows, int64_t size, float* out,
                         int32_t is_bfloat16, int32_t threads) {
    parallel_for(rows, threads, [&](int64_t r) {
        out[r] = is_bfloat16 ? log_sum_exp(static_cast<const BFloat16*>(x) + r * size, size)
                             : log_sum_exp(static_cast<const float*>(x) + r * size, size);
    });
}

// x, y [rows, size], rows `x_stride` and `y_stride` values apart -> out [rows].
void forerun_add_argmax(const void* x, int64_t x_stride, const void* y, int64_t y_stride,
                        int64_t rows, int64_t size, int64_t* out, int32_t is_bfloat16,
                        int32_t threads) {
    parallel_for(rows, threads, [&](int64_t r) {
        const int64_t a = r * x_stride, b = r * y_stride;
        out[r] = is_bfloat16 ? add_argmax(static_cast<const BFloat16*>(x) + a,
                                          static_cast<const BFloat16*>(y) + b, size)
                             : add_argmax(static_cast<const float*>(x) + a,
                                          static_cast<const float*>(y) + b, size);
    });
}

void forerun_confidences(const Confidences* a, int32_t) {
    a->bfloat16 ? confidences<BFloat16>(*a) : confidences<float>(*a);
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
