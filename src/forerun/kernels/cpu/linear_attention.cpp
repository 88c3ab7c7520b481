// Gated DeltaNet (arXiv 2412.06464): the causal convolution, the gated delta rule and the gated norm.
//
// Tokens are computed one after the other, whether they are those of a decode or verify pass or of a
// prompt: a token's result and the state after it have the same bits, in whatever passes the tokens
// before it were computed.
#include <algorithm>
#include <vector>

#include "norm.h"
#include "parallel.h"

namespace forerun {

constexpr float EPS = 1e-6f;  // of the normalisation of q and k

// Of a pass. In Python: `_Pass` in linear_attention.py.
struct Pass {
    const int64_t* slots;        // [B]
    const int32_t* num_pending;  // [S]: updates that are committed and not in the state yet
    const int32_t* num_passes;   // [S]: its parity says which buffer of k and g the last pass wrote
    const int32_t* chunks;       // prompts: [B, 2], first token and number of tokens; else null
    const int64_t* parents;      // trees: [B, q_len], earlier tokens, -1 for the root; else null
    int64_t batch, q_len, width;  // q_len: tokens per request, without chunks; W of the updates

    int64_t first(int64_t b) const { return chunks ? chunks[2 * b] : b * q_len; }
    int64_t count(int64_t b) const { return chunks ? chunks[2 * b + 1] : q_len; }
    int64_t pending(int64_t b) const { return chunks ? 0 : num_pending[slots[b]]; }
    // The token of request b that comes before its token i; negative: before the pass.
    int64_t before(int64_t b, int64_t i) const {
        return parents && i >= 0 ? parents[b * q_len + i] : i - 1;
    }
};

inline size_t padded(int64_t size) { return size_t((size + LANES - 1) / LANES * LANES); }

// x * sigmoid(x) of padded values, in place.
inline void silu(std::vector<float>& x) {
    for (size_t i = 0; i < x.size(); i += LANES) {
        const Vec v = load<Vec>(&x[i]);
        store(&x[i], v * sigmoid_vec(v));
    }
}

// In Python: `_Conv` in linear_attention.py.
struct Conv {
    Pass pass;
    const void* x;       // [T, row_stride]
    const void* weight;  // [C, K]
    void* state;         // [S, K - 1, C]: the last inputs
    void* inputs;        // [S, W, C]: of the last decode or verify pass
    void* out;           // [T, C]
    int64_t row_stride, channels, size;
    int32_t bfloat16;
};

template <class T>
void causal_conv(const Conv& c, int threads) {
    const int64_t before = c.size - 1, channels = c.channels;
    const T *weight = static_cast<const T*>(c.weight), *x = static_cast<const T*>(c.x);
    parallel_for(c.pass.batch, threads, [&](int64_t b) {
        const int64_t slot = c.pass.slots[b], count = c.pass.count(b), first = c.pass.first(b);
        T* state = static_cast<T*>(c.state) + slot * before * channels;
        T* inputs = static_cast<T*>(c.inputs) + slot * c.pass.width * channels;
        std::vector<T> window(size_t(before * channels));
        for (int64_t i = 0; i < before; i++) {
            const int64_t at = c.pass.pending(b) + i;
            const T* row = at < before ? state + at * channels : inputs + (at - before) * channels;
            std::copy_n(row, channels, window.data() + i * channels);
        }
        // Input i of the request: those before its first token are negative.
        const auto input = [&](int64_t i) {
            return i < 0 ? window.data() + (before + i) * channels : x + (first + i) * c.row_stride;
        };
        std::vector<float> sum(padded(channels));
        for (int64_t i = 0; i < count; i++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            std::vector<int64_t> path(size_t(c.size), i);
            for (size_t tap = size_t(before); tap > 0; tap--)
                path[tap - 1] = c.pass.before(b, path[tap]);
            for (int64_t tap = 0; tap < c.size; tap++) {
                const T* row = input(path[size_t(tap)]);
                for (int64_t d = 0; d < channels; d++)
                    sum[size_t(d)] = mul_add(to_float(row[d]), to_float(weight[d * c.size + tap]),
                                             sum[size_t(d)]);
            }
            silu(sum);
            T* out = static_cast<T*>(c.out) + (first + i) * channels;
            for (int64_t d = 0; d < channels; d++) out[d] = from_float<T>(sum[size_t(d)]);
        }
        if (c.pass.chunks == nullptr) {
            std::copy(window.begin(), window.end(), state);
            for (int64_t i = 0; i < count; i++) std::copy_n(input(i), channels, inputs + i * channels);
        } else {
            for (int64_t i = 0; i < before; i++)
                std::copy_n(input(count - before + i), channels, state + i * channels);
        }
    });
}

// In Python: `_Delta` in linear_attention.py.
struct Delta {
    Pass pass;
    const void* qkv;  // [T, 2 HK Dk + HV Dv]
    const void* a;    // [T, HV], any row stride
    const void* b;
    const float* decay;    // [HV]
    const float* dt_bias;  // [HV]
    float* state;  // [S, HV, Dk, Dv]
    float* k;      // [S, W, 2, HK, Dk]
    float* delta;  // [S, W, HV, Dv]
    float* g;      // [S, W, 2, HV]
    void* out;     // [T, HV, Dv]
    int64_t a_stride, b_stride, k_heads, v_heads, k_dim, v_dim;
    int32_t bfloat16;
};

// x / |x| * scale.
template <class T>
void normalise(const T* x, int64_t size, float scale, float* out) {
    Vec sums = {};
    int64_t done = 0;
    for (; done + LANES <= size; done += LANES) {
        const Vec v = load_floats(x + done);
        sums = mul_add(v, v, sums);
    }
    float sum = sum_lanes(sums);
    for (; done < size; done++) sum = mul_add(to_float(x[done]), to_float(x[done]), sum);
    const float factor = scale / std::sqrt(sum + EPS);
    for (int64_t i = 0; i < size; i++) out[i] = to_float(x[i]) * factor;
}

// S <- e^g S + k δᵀ, in two steps, as a token does it.
inline void apply_update(float* state, const float* k, const float* delta, float grown,
                         int64_t k_dim, int64_t v_dim) {
    for (int64_t i = 0; i < k_dim; i++)
        for (int64_t j = 0; j < v_dim; j++) {
            float& s = state[i * v_dim + j];
            s = mul_add(k[i], delta[j], s * grown);
        }
}

// The pending updates of a slot's value head, applied to its state.
inline void apply_pending(const Delta& d, int64_t slot, int64_t head, int64_t count, float* state) {
    const int64_t turn = d.pass.num_passes[slot] & 1, k_head = head / (d.v_heads / d.k_heads);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = slot * d.pass.width + i;
        const float* k = d.k + ((2 * row + turn) * d.k_heads + k_head) * d.k_dim;
        const float* delta = d.delta + (row * d.v_heads + head) * d.v_dim;
        apply_update(state, k, delta, exp_one(d.g[(2 * row + turn) * d.v_heads + head]), d.k_dim,
                     d.v_dim);
    }
}

// softplus(x), as PyTorch computes it.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// A token's part of a value head: advances the state; out [Dv], and k, δ and g of the update.
template <class T>
float advance(const Delta& d, int64_t token, int64_t head, float* state, float* q, float* k,
              float* delta) {
    const int64_t k_head = head / (d.v_heads / d.k_heads), keys = d.k_heads * d.k_dim;
    const T* row = static_cast<const T*>(d.qkv) + token * (2 * keys + d.v_heads * d.v_dim);
    normalise(row + k_head * d.k_dim, d.k_dim, 1.0f / std::sqrt(float(d.k_dim)), q);
    normalise(row + keys + k_head * d.k_dim, d.k_dim, 1.0f, k);
    const T* v = row + 2 * keys + head * d.v_dim;
    const float a = to_float(static_cast<const T*>(d.a)[token * d.a_stride + head]);
    const float b = to_float(static_cast<const T*>(d.b)[token * d.b_stride + head]);
    const float g = -d.decay[head] * softplus(a + d.dt_bias[head]), grown = exp_one(g);
    const float beta = sigmoid_vec(broadcast(b))[0];
    std::vector<float> sum(size_t(d.v_dim));
    for (int64_t i = 0; i < d.k_dim; i++)
        for (int64_t j = 0; j < d.v_dim; j++)
            sum[size_t(j)] = mul_add(state[i * d.v_dim + j] * grown, k[i], sum[size_t(j)]);
    for (int64_t j = 0; j < d.v_dim; j++) delta[j] = beta * (to_float(v[j]) - sum[size_t(j)]);
    apply_update(state, k, delta, grown, d.k_dim, d.v_dim);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t i = 0; i < d.k_dim; i++)
        for (int64_t j = 0; j < d.v_dim; j++)
            sum[size_t(j)] = mul_add(state[i * d.v_dim + j], q[i], sum[size_t(j)]);
    T* out = static_cast<T*>(d.out) + (token * d.v_heads + head) * d.v_dim;
    for (int64_t j = 0; j < d.v_dim; j++) out[j] = from_float<T>(sum[size_t(j)]);
    return g;
}

// The state stays that before the pass; a prompt's is the one after it.
template <class T>
void gated_delta(const Delta& d, int threads) {
    const int64_t size = d.k_dim * d.v_dim, group = d.v_heads / d.k_heads;
    parallel_for(d.pass.batch * d.v_heads, threads, [&](int64_t item) {
        const int64_t b = item / d.v_heads, head = item % d.v_heads, slot = d.pass.slots[b];
        float* kept = d.state + (slot * d.v_heads + head) * size;
        const bool prompt = d.pass.chunks != nullptr, tree = d.pass.parents != nullptr;
        apply_pending(d, slot, head, d.pass.pending(b), kept);
        std::vector<float> q(size_t(d.k_dim)), k(size_t(d.k_dim)), delta(size_t(d.v_dim));
        // Of a chain the state goes from token to token; of a tree, every token has its own.
        const int64_t count = d.pass.count(b);
        std::vector<float> copy(prompt ? 0 : size_t((tree ? count : 1) * size));
        if (!prompt && !tree) std::copy_n(kept, size, copy.data());
        for (int64_t i = 0; i < count; i++) {
            float* state = prompt ? kept : copy.data() + (tree ? i * size : 0);
            if (tree) {
                const int64_t parent = d.pass.before(b, i);
                std::copy_n(parent < 0 ? kept : copy.data() + parent * size, size, state);
            }
            const int64_t token = d.pass.first(b) + i;
            const float g = advance<T>(d, token, head, state, q.data(), k.data(), delta.data());
            if (prompt) continue;
            const int64_t row = slot * d.pass.width + i;
            const int64_t at = 2 * row + 1 - (d.pass.num_passes[slot] & 1);
            std::copy(delta.begin(), delta.end(), d.delta + (row * d.v_heads + head) * d.v_dim);
            d.g[at * d.v_heads + head] = g;
            if (head % group == 0)
                std::copy(k.begin(), k.end(), d.k + (at * d.k_heads + head / group) * d.k_dim);
        }
    });
}

// A head's RMSNorm times SiLU of its gate.
template <class T>
void gated_norm_row(const T* x, const T* z, const T* weight, int64_t size, float eps, T* out) {
    const float scale = inverse_rms(x, size, eps);
    std::vector<float> gate(padded(size));
    for (int64_t i = 0; i < size; i++) gate[size_t(i)] = to_float(z[i]);
    silu(gate);
    for (int64_t i = 0; i < size; i++)
        out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]) * gate[size_t(i)]);
}

}  // namespace forerun

using namespace forerun;

#pragma GCC visibility push(default)
extern "C" {

void forerun_causal_conv(const Conv* c, int32_t threads) {
    (c->bfloat16 ? causal_conv<BFloat16> : causal_conv<float>)(*c, threads);
}

void forerun_gated_delta(const Delta* d, int32_t threads) {
    (d->bfloat16 ? gated_delta<BFloat16> : gated_delta<float>)(*d, threads);
}

// The states of slots after `counts` [n] updates of the last pass, to rows of `snapshots`
// [N, HV, Dk, Dv]; of 0 updates, the row stays as it is.
void forerun_replay_delta(const Delta* d, const int32_t* counts, const int64_t* rows,
                          float* snapshots, int32_t threads) {
    const int64_t size = d->k_dim * d->v_dim;
    parallel_for(d->pass.batch * d->v_heads, threads, [&](int64_t item) {
        const int64_t b = item / d->v_heads, head = item % d->v_heads, slot = d->pass.slots[b];
        if (counts[b] == 0) return;
        float* out = snapshots + (rows[b] * d->v_heads + head) * size;
        std::copy_n(d->state + (slot * d->v_heads + head) * size, size, out);
        apply_pending(*d, slot, head, counts[b], out);
    });
}

// x [T, heads, D], z [T, heads * D] of any row stride -> out [T, heads * D].
void forerun_gated_norm(const void* x, const void* z, const void* weight, const int64_t* sizes,
                        float eps, void* out, int32_t is_bfloat16, int32_t threads) {
    const int64_t tokens = sizes[0], heads = sizes[1], dim = sizes[2], z_stride = sizes[3];
    parallel_for(tokens, tokens >= 16 ? threads : 1, [&](int64_t t) {
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = (t * heads + h) * dim, z_at = t * z_stride + h * dim;
            if (is_bfloat16)
                gated_norm_row(static_cast<const BFloat16*>(x) + at,
                               static_cast<const BFloat16*>(z) + z_at,
                               static_cast<const BFloat16*>(weight), dim, eps,
                               static_cast<BFloat16*>(out) + at);
            else
                gated_norm_row(static_cast<const float*>(x) + at, static_cast<const float*>(z) + z_at,
                               static_cast<const float*>(weight), dim, eps,
                               static_cast<float*>(out) + at);
        }
    });
}

}  // extern "C"
#pragma GCC visibility pop
