// Suffix decoding: drafts from what followed the end of a text before. Reference implementations:
// `*_ref` in kernels/speculation/suffix.py.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace {

// In Python: `suffix_append` in step.py.
struct SuffixAppend {
    const int64_t* slots;
    const int32_t* start;
    const int32_t* committed;
    const int32_t* history;  // [S, positions]
    const int32_t* groups;   // [S]
    int32_t* tokens;         // [N + 1, capacity]
    int32_t* length;         // [N + 1]
    int64_t* owner;
    int32_t* group;
    int64_t* taken;  // [1]
    int64_t* text;   // [S]
    int32_t* first;
    int64_t batch, width, depth, history_stride, capacity, count, padding_slot;
};

// In Python: `suffix_drafts` in step.py.
struct SuffixDrafts {
    const int32_t* history;  // [S, positions]
    const int64_t* slots;
    const int32_t* start;
    const int32_t* groups;  // [S]
    const int32_t* tokens;  // [P, capacity]
    const int32_t* length;  // [P]
    const int32_t* group;
    const int32_t* limits;  // [depth + 1]
    int64_t* drafts;        // [B, K]
    float* confidence;      // [B, K]
    int64_t batch, num_drafts, history_stride, capacity, parts;
    int64_t depth, min_prob, own_part, max_votes, one;
};

// A place that matches the end of the text, and the K tokens behind it; -1 behind a text.
struct SuffixMatch {
    int64_t length;
    std::vector<int32_t> next;
};

// The drafts with the best score so far.
struct SuffixBest {
    int64_t score;
    std::vector<int64_t> tokens;  // [K]
    std::vector<float> shares;
};

// length << 32 | index of the longest match with the end of `row` in text[begin, end), the latest
// of them; -1 without one. Matches do not go below text[low].
int64_t longest_match(const int32_t* row, int64_t last, const int32_t* text, int64_t low,
                             int64_t begin, int64_t end, int64_t depth) {
    int32_t any = 0;
    for (int64_t at = begin; at < end; at++) any |= text[at] == row[last];
    int64_t best = -1, longest = 0;
    if (any == 0) return best;
    for (int64_t at = end - 1; at >= begin && longest < depth; at--) {
        int64_t length = 0;
        while (length < depth && length <= at - low && length <= last &&
               text[at - length] == row[last - length])
            length++;
        if (length > longest) longest = length, best = length << 32 | at;
    }
    return best;
}

// Drafts by the majority of the matches of at least each length; `again`: where there is none.
void suffix_vote(const SuffixDrafts* a, const std::vector<SuffixMatch>& matches, int32_t again,
                 SuffixBest& best) {
    SuffixBest found = best;
    for (size_t level = 0; level < matches.size(); level++) {
        const int64_t length = matches[level].length;
        if (level + 1 < matches.size() && matches[level + 1].length == length) continue;
        std::vector<const SuffixMatch*> alive;
        for (size_t i = 0; i <= level; i++) alive.push_back(&matches[i]);
        int64_t prob = a->one;
        found.score = 0;
        for (size_t i = 0; i < found.tokens.size(); i++) {
            int32_t token = -1;
            int64_t most = 0;
            for (const SuffixMatch* each : alive) {
                if (each->next[i] < 0 || each->next[i] == token) continue;
                int64_t votes = 0;
                for (const SuffixMatch* other : alive) votes += other->next[i] == each->next[i];
                if (votes > most) most = votes, token = each->next[i];
            }
            const int64_t total = std::max<int64_t>(int64_t(alive.size()), 1);
            prob = prob * most / total;
            const bool answers =
                int64_t(i) < a->limits[length] && prob >= a->min_prob && prob > 0;
            if (answers) found.score += prob;
            found.shares[i] = answers ? float(most) / float(total) : 0.0f;
            found.tokens[i] = most > 0 ? token : again;
            const auto leaves = [&](const SuffixMatch* each) {
                return token < 0 || each->next[i] != token;
            };
            alive.erase(std::remove_if(alive.begin(), alive.end(), leaves), alive.end());
        }
        if (found.score > best.score) best = found;
    }
}

// The best matches of those found, with their tokens: text[at + 1] … text[end - 1], and again from
// the first on if `periodic`.
template <class End>
std::vector<SuffixMatch> suffix_matches(const SuffixDrafts* a, std::vector<int64_t>& found,
                                        const int32_t* text, bool periodic, End end_of) {
    std::sort(found.begin(), found.end(), std::greater<>());
    found.resize(std::min(found.size(), size_t(a->max_votes)));
    std::vector<SuffixMatch> matches;
    for (int64_t each : found) {
        const int64_t at = each & 0x7fffffff, size = end_of(at) - at - 1;
        SuffixMatch match{each >> 32, std::vector<int32_t>(size_t(a->num_drafts), -1)};
        for (int64_t i = 0; i < a->num_drafts && (i < size || periodic); i++)
            match.next[size_t(i)] = text[at + 1 + i % size];
        matches.push_back(std::move(match));
    }
    return matches;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void forerun_suffix_append(const SuffixAppend* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b], text = a->text[slot], start = a->start[b];
        const bool full = start + a->width - a->first[slot] >= a->capacity;
        if (slot == a->padding_slot || !(text == 0 || a->owner[text] != slot || full)) continue;
        a->text[slot] = (*a->taken)++ % a->count + 1;
        a->owner[a->text[slot]] = slot;
        a->first[slot] = int32_t(std::max<int64_t>(start - (a->depth - 1), 0));
    }
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b], start = a->start[b];
        if (a->owner[a->text[slot]] != slot) a->text[slot] = 0;
        const int64_t text = a->text[slot], first = a->first[slot];
        if (text == 0) continue;
        const int64_t end = start + a->committed[b] + 1;
        const int32_t* row = a->history + slot * a->history_stride;
        for (int64_t at = std::max(first, start - (a->depth - 1)); at < end; at++)
            a->tokens[text * a->capacity + at - first] = row[at];
        a->length[text] = int32_t(end - first);
        a->group[text] = a->groups[slot];
    }
}

void forerun_suffix_drafts(const SuffixDrafts* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b], last = a->start[b];
        const int32_t* row = a->history + slot * a->history_stride;
        std::vector<int64_t> own, others;
        for (int64_t begin = 0; begin < last; begin += a->own_part) {
            const int64_t end = std::min(begin + a->own_part, last);
            const int64_t found = longest_match(row, last, row, 0, begin, end, a->depth);
            if (found >= 0) own.push_back(found);
        }
        for (int64_t part = 0; part < a->parts; part++) {
            if (a->group[part] != a->groups[slot]) continue;
            const int64_t low = part * a->capacity, end = low + a->length[part] - 1;
            const int64_t found = longest_match(row, last, a->tokens, low, low, end, a->depth);
            if (found >= 0) others.push_back(found);
        }
        const size_t count = size_t(a->num_drafts);
        SuffixBest best{0, std::vector<int64_t>(count, row[last]), std::vector<float>(count, 0.0f)};
        const auto own_end = [&](int64_t) { return last + 1; };
        const auto text_end = [&](int64_t at) {
            return at / a->capacity * a->capacity + a->length[at / a->capacity];
        };
        suffix_vote(a, suffix_matches(a, own, row, true, own_end), row[last], best);
        suffix_vote(a, suffix_matches(a, others, a->tokens, false, text_end), row[last], best);
        std::copy(best.tokens.begin(), best.tokens.end(), a->drafts + b * a->num_drafts);
        std::copy(best.shares.begin(), best.shares.end(), a->confidence + b * a->num_drafts);
    }
}

}  // extern "C"
#pragma GCC visibility pop
