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
        sums += v * v;
    }
    float sum = sum_lanes(sums);
    for (; i < size; i++) sum += to_float(x[i]) * to_float(x[i]);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

template <class T>
inline void rms_norm_row(const T* x, const T* weight, int64_t size, float eps, T* out) {
    const float scale = inverse_rms(x, size, eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
}

// out = SiLU(gate) * up
template <class T>
inline void silu_mul_row(const float* gate, const float* up, int64_t size, T* out) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = int(size - i < LANES ? size - i : LANES);
        float g[LANES] = {}, u[LANES] = {};
        for (int j = 0; j < count; j++) g[j] = gate[i + j], u[j] = up[i + j];
        const Vec v = load<Vec>(g);
        const Vec y = v / (1.0f + exp_vec(-v)) * load<Vec>(u);
        store(g, y);
        for (int j = 0; j < count; j++) out[i + j] = from_float<T>(g[j]);
    }
}

}  // namespace forerun
