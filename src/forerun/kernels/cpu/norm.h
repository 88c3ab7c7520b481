// RMSNorm and SiLU of a row, for the epilogues of GEMMs and alone.
#pragma once

#include "vec.h"

namespace forerun {

// 1 / sqrt(mean(x²) + eps) of size values; the order of additions depends on size alone.
template <class T>
inline float inverse_rms(const T* x, int64_t size, float eps) {
    Vec sums = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Vec v = load_floats(x + i);
        sums = mul_add(v, v, sums);
    }
    float sum = sum_lanes(sums);
    for (; i < size; i++) sum = mul_add(to_float(x[i]), to_float(x[i]), sum);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

template <class T>
inline void rms_norm_row(const T* x, const T* weight, int64_t size, float eps, T* out) {
    const float scale = inverse_rms(x, size, eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_floats(out + i, load_floats(x + i) * scale * load_floats(weight + i));
    for (; i < size; i++) out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
}

inline Vec silu_mul(Vec gate, Vec up) { return gate / (1.0f + exp_vec(-gate)) * up; }

// out = SiLU(gate) * up
template <class T>
inline void silu_mul_row(const float* gate, const float* up, int64_t size, T* out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_floats(out + i, silu_mul(load<Vec>(gate + i), load<Vec>(up + i)));
    for (; i < size; i++)
        out[i] = from_float<T>(silu_mul(broadcast(gate[i]), broadcast(up[i]))[0]);
}

}  // namespace forerun
