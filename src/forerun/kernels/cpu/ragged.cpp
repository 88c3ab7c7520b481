// Ragged verify passes: what drafts survive, how the tokens of a step are divided, and their rows.
// Reference implementations: `*_ref` in speculative/ragged and kernels/speculation/ragged.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

// In Python: `ESTIMATOR_RULE` in speculative/ragged/estimator.py.
struct EstimatorRule {
    float initial_rate, prior_weight, request_window, global_window, global_steps, plain_fade;
    float largest_logit, largest_shift, smallest_rate;
    float least_information, information_fade, largest_slope, bins, fraction;
};

// The tensors of `Estimator`, R rows of K each; the last row is over all requests.
struct EstimatorTables {
    float* accepted;
    float* logit;
    float* count;
    float* prior;     // [K]
    float* slope;     // [2]
    int64_t* counts;  // [bins, 3]
};

float logit_of(float p, const EstimatorRule& rule) {
    if (std::isnan(p)) p = 0.5f;
    return std::clamp(std::log(p) - std::log(1.0f - p), -rule.largest_logit, rule.largest_logit);
}

// What is expected of a draft before it is tested.
struct Expected {
    float rate, deviation;
};

Expected expected_rate(const EstimatorTables& t, const EstimatorRule& rule, int64_t at, int64_t all,
                       int64_t k, const float* confidence) {
    const float count = t.count[at], weight = count + rule.prior_weight;
    const float rate = (count * t.accepted[at] + rule.prior_weight * t.prior[k]) / weight;
    if (confidence == nullptr) return {rate, 0.0f};
    const float mean = (count * t.logit[at] + rule.prior_weight * t.logit[all]) / weight;
    const float deviation = t.count[all] > 0.0f ? logit_of(confidence[k], rule) - mean : 0.0f;
    const float shift =
        std::clamp(t.slope[0] * deviation, -rule.largest_shift, rule.largest_shift);
    const float inner = std::clamp(rate, rule.smallest_rate, 1.0f - rule.smallest_rate);
    return {1.0f / (1.0f + (1.0f - inner) / inner * std::exp(-shift)), deviation};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// In Python: `survival` in ragged.py.
struct Survival {
    const EstimatorRule* rule;
    EstimatorTables tables;
    const int64_t* slots;
    const int32_t* limits;
    const float* confidence;  // [B, K] or null
    float* out;               // [B, K]
    int64_t batch, num_drafts, rows, confidence_stride;
};

void forerun_survival(const Survival* a, int32_t) {
    const int64_t drafts = a->num_drafts, all = (a->rows - 1) * drafts;
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b];
        const float* confidence =
            a->confidence ? a->confidence + b * a->confidence_stride : nullptr;
        float product = 1.0f;
        for (int64_t k = 0; k < drafts; k++) {
            const int64_t at = slot * drafts + k;
            const bool takes = k < a->limits[slot];
            product *= takes ? expected_rate(a->tables, *a->rule, at, all + k, k, confidence).rate
                             : 0.0f;
            a->out[b * drafts + k] = product;
        }
    }
}

// In Python: `learn` in ragged.py.
struct Learn {
    const EstimatorRule* rule;
    EstimatorTables tables;
    const int64_t* slots;
    const int32_t* widths;     // [B], or null: `width` for all
    const int32_t* committed;  // [B]
    const int32_t* limits;     // by slot, or null
    const float* confidence;   // [B, K] or null
    int64_t batch, num_drafts, rows, confidence_stride, width, num_drafting;
};

void forerun_learn(const Learn* a, int32_t) {
    const EstimatorRule& rule = *a->rule;
    const EstimatorTables& t = a->tables;
    const int64_t num_drafts = a->num_drafts, all = (a->rows - 1) * num_drafts;
    struct Sums {
        float tests = 0, hits = 0, logits = 0;
        bool outdated = false;
    };
    std::vector<Sums> sums(static_cast<size_t>(num_drafts));
    double error = 0, gained = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b];
        if (slot >= a->rows - 2) continue;  // padding
        const int64_t width = a->widths ? a->widths[b] : a->width;
        int64_t drafts = b < a->num_drafting ? width - 1 : 0;
        if (a->limits) drafts = std::min<int64_t>(drafts, a->limits[slot]);
        const int64_t accepted = std::min<int64_t>(a->committed[b] - 1, drafts);
        const float* confidence =
            a->confidence ? a->confidence + b * a->confidence_stride : nullptr;
        const float fade = drafts == 0 ? rule.plain_fade : 1.0f - 1.0f / rule.request_window;
        for (int64_t k = 0; k < num_drafts; k++) {
            const int64_t at = slot * num_drafts + k;
            if (k >= drafts) {
                if (accepted == drafts) {
                    t.count[at] *= fade;
                    sums[k].outdated |= drafts > 0;
                }
                continue;
            }
            if (k > accepted) continue;
            const float hit = k < accepted ? 1.0f : 0.0f;
            const Expected e = expected_rate(t, rule, at, all + k, k, confidence);
            const int64_t bin = std::min(int64_t(e.rate * rule.bins), int64_t(rule.bins) - 1);
            int64_t* counts = t.counts + 3 * bin;
            counts[0] += 1, counts[1] += int64_t(hit);
            counts[2] += int64_t(std::floor(e.rate * rule.fraction + 0.5f));
            error += (hit - e.rate) * e.deviation;
            gained += e.rate * (1.0f - e.rate) * e.deviation * e.deviation;
            const float logit = confidence ? logit_of(confidence[k], rule) : 0.0f;
            t.count[at] = std::min(t.count[at] + 1.0f, rule.request_window);
            const float share = 1.0f / std::max(t.count[at], 1.0f);
            t.accepted[at] += share * (hit - t.accepted[at]);
            t.logit[at] += share * (logit - t.logit[at]);
            sums[k].tests += 1, sums[k].hits += hit, sums[k].logits += logit;
        }
    }
    if (a->confidence != nullptr) {
        const float before = t.slope[1] * rule.information_fade;
        t.slope[1] = std::max(before, rule.least_information) + float(gained);
        t.slope[0] = std::clamp(t.slope[0] + float(error) / t.slope[1], 0.0f, rule.largest_slope);
    }
    const float least = std::max(rule.global_window, rule.global_steps * float(a->batch));
    float rate = rule.initial_rate;
    for (int64_t k = 0; k < num_drafts; k++) {
        const Sums& s = sums[k];
        float& count = t.count[all + k];
        if (s.tests > 0)
            count = std::min(count + s.tests, std::max(s.tests, least));
        else
            count *= s.outdated ? 1.0f - 1.0f / rule.global_window : rule.plain_fade;
        const float known = std::max(count, 1.0f);
        t.accepted[all + k] += (s.hits - s.tests * t.accepted[all + k]) / known;
        t.logit[all + k] += (s.logits - s.tests * t.logit[all + k]) / known;
        const float weight = count + rule.prior_weight;
        rate = (count * t.accepted[all + k] + rule.prior_weight * rate) / weight;
        t.prior[k] = rate;
    }
}

// In Python: `count_reliability` in ragged.py.
struct CountReliability {
    double* counts;            // [2 * bins, 3]
    const float* confidence;   // [B, D]
    const int32_t* committed;  // [B]
    const int64_t* slots;      // [B]
    const int32_t* limits;     // by slot
    const float* temperature;  // by slot
    const int32_t* widths;     // [B], or null: all drafts and one
    int64_t batch, depth, bins, temperature_stride, padding_slot;
};

void forerun_count_reliability(const CountReliability* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b];
        if (slot == a->padding_slot) continue;
        const int64_t committed = a->committed[b];
        int64_t tested = std::min<int64_t>({committed, a->limits[slot], a->depth});
        if (a->widths) tested = std::min<int64_t>(tested, a->widths[b] - 1);
        const bool greedy = a->temperature[slot * a->temperature_stride] <= 0;
        for (int64_t k = 0; k < tested; k++) {
            const float confidence = a->confidence[b * a->depth + k];
            const float place = confidence * float(a->bins);
            const int64_t last = a->bins - 1;
            const int64_t bin = place > 0 ? int64_t(std::min(place, float(last))) : 0;
            double* counts = a->counts + 3 * (bin + (greedy ? 0 : a->bins));
            counts[0] += 1, counts[1] += k < committed - 1, counts[2] += double(confidence);
        }
    }
}

// In Python: `allocate` in ragged.py.
struct Allocate {
    const float* survival;  // [B, K]
    int32_t* widths;        // [B]
    int64_t batch, num_drafts, stride, wanted;
};

void forerun_allocate(const Allocate* a, int32_t) {
    struct Candidate {
        float value;
        int64_t rank;  // by position, then by request
    };
    std::vector<Candidate> all;
    all.reserve(size_t(a->batch * a->num_drafts));
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t k = 0; k < a->num_drafts; k++) {
            const float value = a->survival[b * a->stride + k];
            all.push_back({value > 0.0f ? std::min(value, 1.0f) : 0.0f, k * a->batch + b});
        }
    std::fill(a->widths, a->widths + a->batch, 1);
    std::nth_element(all.begin(), all.begin() + a->wanted, all.end(),
                     [](const Candidate& x, const Candidate& y) {
                         return x.value != y.value ? x.value > y.value : x.rank < y.rank;
                     });
    for (int64_t i = 0; i < a->wanted; i++) a->widths[all[i].rank % a->batch]++;
}

// In Python: `pack_tokens` in ragged.py.
struct PackTokens {
    const int32_t* widths;  // [B]
    const int64_t* ids;     // [B, W]
    int64_t* candidates;    // [B, W - 1]
    const int32_t* positions;
    const int64_t* kv_slots;
    int32_t* first;   // [B + 1]
    int64_t* places;  // [N]
    int64_t* rows;    // [B * W]
    int64_t* packed_ids;
    int32_t* packed_positions;
    int64_t* packed_kv_slots;
    int64_t batch, width, num_rows;
};

void forerun_pack_tokens(const PackTokens* a, int32_t) {
    int64_t row = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t width = a->widths[b];
        a->first[b] = int32_t(row);
        for (int64_t i = 0; i < a->width; i++) {
            const int64_t place = b * a->width + i;
            a->rows[place] = row + std::min(i, width - 1);
            if (i >= width) {
                a->candidates[place - b - 1] = -1;
                continue;
            }
            const int64_t to = row + i;
            if (to >= a->num_rows) continue;  // a width past the rows that there are
            a->places[to] = place, a->packed_ids[to] = a->ids[place];
            a->packed_positions[to] = a->positions[place];
            a->packed_kv_slots[to] = a->kv_slots[place];
        }
        row += width;
    }
    a->first[a->batch] = int32_t(row);
}

}  // extern "C"
#pragma GCC visibility pop
