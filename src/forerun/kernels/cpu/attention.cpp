// Attention of query tokens over paged K/V: causal, block and tree masks, windows, grouped heads.
//
// A work item is a tile of query tokens with all heads that share a K/V head, over one part of the
// context. K/V is read in blocks of BLOCK positions: K is transposed, so that a register holds
// scores of LANES positions, and the softmax is kept up block by block (FlashAttention-2, arXiv
// 2307.08691). Blocks and parts begin at multiples of their size, and a position that a token does
// not see adds exactly nothing. A tree's token has its ancestors where a chain of them would have
// been. So a token's result depends on what it sees alone, not on the other tokens, on siblings or
// on the number of threads.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace forerun {

constexpr int BLOCK = 32;          // positions
constexpr int64_t PART = 1024;     // positions of a work item
constexpr int MAX_ROWS = 32;       // query tokens times heads of a tile
constexpr int VECTORS = BLOCK / LANES;
enum Mask : int32_t { CAUSAL_MASK, BLOCK_MASK, SLIDING_BLOCK_MASK };  // see `LayerMask`

// In Python: `_Attention` in attention.py.
struct Attention {
    const void* q;        // [T, heads, D]
    const void* k_pool;   // [pages, page_size, kv_heads, D]
    const void* v_pool;
    const int32_t* page_table;  // [B, page_stride]
    const int32_t* start;       // [B]: position of the first token
    const int64_t* first;       // [B + 1]: of each request in T; null: q_len tokens each
    const int64_t* tree;  // [B, q_len, words of 64 bits]: bit j of token i: it sees token j; or null
    const float* sinks;         // [heads] or null
    void* out;                  // [T, heads, D]
    int64_t batch, q_len, heads, kv_heads, dim, page_size, page_stride;
    int64_t window;     // 0: none
    float scale, softcap;  // softcap 0: none
    int32_t mask;  // a `Mask`; a tree replaces the causal one
    int32_t bfloat16_q, bfloat16_pool;
};

// Query tokens [token, token + tokens) of a request, and the K/V head they share.
struct Tile {
    int64_t request, kv_head, token, tokens, first_row;
    int64_t start, length;  // of the request: its first position, its number of tokens
};

// The positions that a token sees: [begin, end).
struct Span {
    int64_t begin, end;
};

// The bits of a tree's token, 64 to a word.
inline const int64_t* tree_row(const Attention& a, const Tile& tile, int64_t token) {
    return a.tree + (tile.request * a.q_len + token) * ((a.q_len + 63) / 64);
}

inline Span span_of(const Attention& a, const Tile& tile, int64_t token) {
    const int64_t position = tile.start + token, end = tile.start + tile.length;
    if (a.mask == BLOCK_MASK)
        return {a.window ? std::max<int64_t>(0, tile.start - a.window) : 0, end};
    if (a.mask == SLIDING_BLOCK_MASK)
        return {std::max<int64_t>(0, position - a.window + 1),
                std::min<int64_t>(end, position + a.window)};
    if (a.tree != nullptr) {
        int64_t seen = 0;  // of the tree
        for (int64_t w = 0; w < (a.q_len + 63) / 64; w++)
            seen += __builtin_popcountll(uint64_t(tree_row(a, tile, token)[w]));
        return {0, tile.start + seen};
    }
    return {a.window ? std::max<int64_t>(0, position - a.window + 1) : 0, position + 1};
}

// The KV positions at which the ancestors of a tree's token were written, and its own, in their
// order. A chain of them would have stood at the first positions from the start on.
inline std::vector<int64_t> tree_path(const Attention& a, const Tile& tile, int64_t token) {
    std::vector<int64_t> path;
    for (int64_t i = 0; i <= token; i++)
        if (tree_row(a, tile, token)[i / 64] >> i % 64 & 1) path.push_back(tile.start + i);
    return path;
}

// The softmax of the rows of a tile so far. Rows are tokens, then heads of the group.
struct State {
    float* largest;  // [rows]
    float* sum;      // [rows]
    float* out;      // [rows, D], not yet divided by sum
};

// Where a block's positions are in the pools: `count` offsets, in values. `path`: where those from
// the request's start on were written, of a tree; else in order.
inline int find_block(const Attention& a, const Tile& tile, const int64_t* path, int64_t begin,
                      int64_t end, int64_t* offsets) {
    const int count = int(std::min<int64_t>(BLOCK, end - begin));
    const int32_t* pages = a.page_table + tile.request * a.page_stride;
    const int64_t row = a.kv_heads * a.dim;
    const auto offset = [&](int64_t page, int64_t place) {
        return (pages[page] * a.page_size + place) * row + tile.kv_head * a.dim;
    };
    int64_t page = begin / a.page_size, place = begin % a.page_size;
    for (int i = 0; i < count; i++) {
        offsets[i] = offset(page, place);
        if (++place == a.page_size) page++, place = 0;
    }
    for (int64_t i = std::max<int64_t>(0, tile.start - begin); path != nullptr && i < count; i++) {
        const int64_t at = path[begin + i - tile.start];
        offsets[i] = offset(at / a.page_size, at % a.page_size);
    }
    return count;
}

// Into L2, rows of K or V that are read a block later: where they are does not follow from where
// these are, so no hardware prefetcher finds them.
template <class P>
void prefetch_rows(const P* pool, const int64_t* offsets, int count, int64_t dim) {
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(P)))
            __builtin_prefetch(pool + offsets[i] + d, 0, 2);
}

// LANES positions and as many dimensions of K from d on, transposed: a register holds one dimension.
// Positions past `count` are zeros: memory there may be NaN.
template <class P>
inline void load_keys(const P* pool, const int64_t* offsets, int count, int64_t d,
                      Vec (&rows)[LANES]) {
    if (count >= LANES)
        FORERUN_UNROLL
        for (int i = 0; i < LANES; i++) rows[i] = load_floats(pool + offsets[i] + d);
    else
        for (int i = 0; i < LANES; i++)
            rows[i] = i < count ? load_floats(pool + offsets[i] + d) : Vec{};
    transpose(rows);
}

// K of a block, transposed: [D, BLOCK].
template <class P>
void transpose_keys(const P* pool, const int64_t* offsets, int count, int64_t dim, float* out) {
    for (int first = 0; first < BLOCK; first += LANES) {
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            Vec rows[LANES];
            load_keys(pool, offsets + first, count - first, d, rows);
            for (int i = 0; i < LANES; i++) store(out + (d + i) * BLOCK + first, rows[i]);
        }
        for (; d < dim; d++)
            for (int i = first; i < first + LANES; i++)
                out[d * BLOCK + i] = i < count ? to_float(pool[offsets[i] + d]) : 0.0f;
    }
}

// scores[r, BLOCK] of ROWS rows: q [rows, D] times keys [D, BLOCK].
template <int ROWS>
void score_rows(const float* q, const float* keys, int64_t dim, float* scores) {
    Vec sum[ROWS][VECTORS] = {};
    for (int64_t d = 0; d < dim; d++) {
        FORERUN_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            const Vec key = load<Vec>(keys + d * BLOCK + v * LANES);
            FORERUN_UNROLL
            for (int r = 0; r < ROWS; r++)
                sum[r][v] = mul_add(key, q[r * dim + d], sum[r][v]);
        }
    }
    std::memcpy(scores, sum, sizeof sum);
}

// As many rows at once as the registers hold, so that sums do not wait for each other.
template <int ROWS = LANES == 16 ? 8 : 2>
void score_tile(const float* q, const float* keys, int64_t rows, int64_t dim, float* scores) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        score_rows<ROWS>(q + r * dim, keys, dim, scores + r * BLOCK);
    if constexpr (ROWS > 1)
        score_tile<ROWS / 2>(q + r * dim, keys, rows - r, dim, scores + r * BLOCK);
}

// The same for few rows, without storing K; dim is a multiple of LANES.
template <class P, int ROWS>
void score_few(const float* q, const P* pool, const int64_t* offsets, int count, int64_t dim,
               float* scores) {
    for (int first = 0; first < BLOCK; first += LANES) {
        Vec sum[ROWS] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            Vec keys[LANES];
            load_keys(pool, offsets + first, count - first, d, keys);
            FORERUN_UNROLL
            for (int i = 0; i < LANES; i++) {
                FORERUN_UNROLL
                for (int r = 0; r < ROWS; r++)
                    sum[r] = mul_add(keys[i], q[r * dim + d + i], sum[r]);
            }
        }
        for (int r = 0; r < ROWS; r++) store(scores + r * BLOCK + first, sum[r]);
    }
}

template <class P>
void score_block(const float* q, const P* pool, const int64_t* offsets, int count, int64_t rows,
                 int64_t dim, float* keys, float* scores) {
    if (rows == 1 && dim % LANES == 0)
        return score_few<P, 1>(q, pool, offsets, count, dim, scores);
    if (rows == 2 && dim % LANES == 0)
        return score_few<P, 2>(q, pool, offsets, count, dim, scores);
    if (rows == 4 && dim % LANES == 0)
        return score_few<P, 4>(q, pool, offsets, count, dim, scores);
    transpose_keys(pool, offsets, count, dim, keys);
    score_tile(q, keys, rows, dim, scores);
}

// Scales, caps and masks the scores of a token's row, in place.
inline void mask_row(const Attention& a, const Tile& tile, int64_t token, int64_t begin,
                     float* scores) {
    for (int i = 0; i < BLOCK && a.softcap != 0; i++)
        scores[i] = a.softcap * std::tanh(scores[i] / a.softcap);
    const Span span = span_of(a, tile, token);
    if (span.begin > begin || span.end < begin + BLOCK)
        for (int i = 0; i < BLOCK; i++)
            if (begin + i < span.begin || begin + i >= span.end) scores[i] = -INFINITY;
}

// Scores of a row become weights relative to its largest score so far; returns what the sums
// before must be multiplied by. False: the row sees nothing of this block.
inline bool softmax_row(float* scores, float* largest, float* sum, float* factor) {
    Vec most = load<Vec>(scores);
    for (int v = 1; v < VECTORS; v++) {
        const Vec other = load<Vec>(scores + v * LANES);
        most = most > other ? most : other;
    }
    const float largest_now = std::max(*largest, max_lanes(most));
    if (largest_now == -INFINITY) return false;
    Vec total = {};
    for (int v = 0; v < VECTORS; v++) {
        const Vec weight = exp_vec(load<Vec>(scores + v * LANES) - largest_now);
        store(scores + v * LANES, weight);
        total += weight;
    }
    *factor = *largest == largest_now ? 1.0f : exp_one(*largest - largest_now);
    *sum = *sum * *factor + sum_lanes(total);
    *largest = largest_now;
    return true;
}

// out[ROWS, dims of one step] += weights [ROWS, BLOCK] times V.
template <class P, int ROWS>
void add_values(const P* const* rows, int count, const float* weights, int64_t dim, float* out) {
    // Registers along a head, for which the sums of all rows stay in registers.
    constexpr int WIDE = ROWS == 4 && VECTOR_REGISTERS == 16 ? 2 : 4;
    const auto columns = [&](int64_t d, auto width) {
        constexpr int W = decltype(width)::value;
        Vec sum[ROWS][W];
        FORERUN_UNROLL
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < W; w++) sum[r][w] = load<Vec>(out + r * dim + d + w * LANES);
        for (int i = 0; i < count; i++) {
            Vec value[W];
            FORERUN_UNROLL
            for (int w = 0; w < W; w++) value[w] = load_floats(rows[i] + d + w * LANES);
            FORERUN_UNROLL
            for (int r = 0; r < ROWS; r++)
                for (int w = 0; w < W; w++)
                    sum[r][w] = mul_add(value[w], weights[r * BLOCK + i], sum[r][w]);
        }
        FORERUN_UNROLL
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < W; w++) store(out + r * dim + d + w * LANES, sum[r][w]);
    };
    int64_t d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES) columns(d, std::integral_constant<int, WIDE>{});
    for (; d + LANES <= dim; d += LANES) columns(d, std::integral_constant<int, 1>{});
    for (; d < dim; d++)
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < count; i++)
                out[r * dim + d] =
                    mul_add(to_float(rows[i][d]), weights[r * BLOCK + i], out[r * dim + d]);
}

template <class P, int ROWS>
void add_all(const P* const* values, int count, const float* weights, int64_t rows, int64_t dim,
             float* out) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        add_values<P, ROWS>(values, count, weights + r * BLOCK, dim, out + r * dim);
    if constexpr (ROWS > 1)
        add_all<P, ROWS / 2>(values, count, weights + r * BLOCK, rows - r, dim, out + r * dim);
}

// Positions [begin, end) for all rows of a tile; q is scaled already. `path`: of a tree's token.
template <class P>
void attend_blocks(const Attention& a, const Tile& tile, const int64_t* path, const float* q,
                   int64_t begin, int64_t end, State state, float* keys) {
    const int64_t group = a.heads / a.kv_heads, rows = tile.tokens * group;
    const P *k_pool = static_cast<const P*>(a.k_pool), *v_pool = static_cast<const P*>(a.v_pool);
    float scores[MAX_ROWS * BLOCK];
    int64_t offsets[BLOCK], next[BLOCK];
    const int64_t first = begin / BLOCK * BLOCK;
    int count = find_block(a, tile, path, first, end, offsets);
    for (int64_t p = first; p < end; p += BLOCK) {
        const int next_count =
            p + BLOCK < end ? find_block(a, tile, path, p + BLOCK, end, next) : 0;
        prefetch_rows(k_pool, next, next_count, a.dim);
        score_block(q, k_pool, offsets, count, rows, a.dim, keys, scores);
        prefetch_rows(v_pool, next, next_count, a.dim);
        const P* values[BLOCK];
        for (int i = 0; i < count; i++) values[i] = v_pool + offsets[i];
        bool seen[MAX_ROWS];
        for (int64_t r = 0; r < rows; r++) {
            float* row = scores + r * BLOCK;
            float factor = 1;
            mask_row(a, tile, tile.token + r / group, p, row);
            seen[r] = softmax_row(row, state.largest + r, state.sum + r, &factor);
            if (!seen[r]) std::fill(row, row + BLOCK, 0.0f);
            if (factor != 1)
                for (int64_t d = 0; d < a.dim; d++) state.out[r * a.dim + d] *= factor;
        }
        add_all<P, 4>(values, count, scores, rows, a.dim, state.out);
        std::copy(next, next + next_count, offsets);
        count = next_count;
    }
}

// The same of any tile. A tree's tokens share the blocks before the one in which the tree begins.
template <class P>
void attend_part(const Attention& a, const Tile& tile, const float* q, int64_t begin, int64_t end,
                 State state, float* keys) {
    if (a.tree == nullptr) return attend_blocks<P>(a, tile, nullptr, q, begin, end, state, keys);
    const int64_t group = a.heads / a.kv_heads;
    const int64_t own = std::min(end, std::max(begin, tile.start / BLOCK * BLOCK));
    attend_blocks<P>(a, tile, nullptr, q, begin, own, state, keys);
    for (int64_t i = 0; i < tile.tokens; i++) {
        Tile token = tile;
        token.token += i, token.tokens = 1;
        const std::vector<int64_t> path = tree_path(a, tile, token.token);
        const int64_t row = i * group, last = std::min(end, span_of(a, tile, token.token).end);
        const State rows = {state.largest + row, state.sum + row, state.out + row * a.dim};
        attend_blocks<P>(a, token, path.data(), q + row * a.dim, own, last, rows, keys);
    }
}

// Adds a part's softmax to that of the parts before it.
inline void merge(State total, State part, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        const float before = total.largest[r], own = part.largest[r];
        if (own == -INFINITY) continue;  // it saw nothing
        const float largest = std::max(before, own);
        const float keep = before == largest ? 1.0f : exp_one(before - largest);
        const float take = own == largest ? 1.0f : exp_one(own - largest);
        total.largest[r] = largest;
        total.sum[r] = total.sum[r] * keep + part.sum[r] * take;
        for (int64_t d = r * dim; d < (r + 1) * dim; d++)
            total.out[d] = total.out[d] * keep + part.out[d] * take;
    }
}

// All tiles of a call. Where these are too few for the threads, parts of a tile's context are
// work items of their own.
template <class T, class P>
class Work {
   public:
    explicit Work(const Attention& a) : a_(a), group_(a.heads / a.kv_heads) {
        const int64_t most = std::max<int64_t>(1, MAX_ROWS / group_);  // tokens of a tile
        for (int64_t b = 0; b < a.batch; b++) {
            const int64_t length = a.first ? a.first[b + 1] - a.first[b] : a.q_len;
            const int64_t first = a.first ? a.first[b] : b * a.q_len;
            const int64_t tiles = (length + most - 1) / most;
            for (int64_t i = 0; i < tiles * a.kv_heads; i++) {
                const int64_t t = i % tiles, token = length * t / tiles;
                const int64_t tokens = length * (t + 1) / tiles - token;
                tiles_.push_back({b, i / tiles, token, tokens, first + token, a.start[b], length});
            }
        }
    }

    void run(int threads) {
        const int64_t count = int64_t(tiles_.size());
        if (count < 4 * threads && threads > 1) return run_parts(threads);
        parallel_for(count, threads, [&](int64_t i) {
            const Tile& tile = tiles_[size_t(i)];
            const Span all = parts_of(tile);
            float* memory = thread_memory(2);
            const State total = fresh(memory, tile, true);
            for (int64_t part = all.begin; part < all.end; part++)
                merge(total, attend(tile, part, memory + state_size()), rows_of(tile), a_.dim);
            write(tile, total);
        });
    }

   private:
    void run_parts(int threads) {
        std::vector<std::pair<const Tile*, int64_t>> items;
        for (const Tile& tile : tiles_)
            for (int64_t p = parts_of(tile).begin; p < parts_of(tile).end; p++)
                items.push_back({&tile, p});
        std::vector<float> states(items.size() * size_t(state_size()));
        parallel_for(int64_t(items.size()), threads, [&](int64_t i) {
            attend(*items[size_t(i)].first, items[size_t(i)].second,
                   states.data() + i * state_size());
        });
        size_t item = 0;
        for (const Tile& tile : tiles_) {
            const State total = fresh(thread_memory(2), tile, true);
            for (; item < items.size() && items[item].first == &tile; item++) {
                float* part = states.data() + item * size_t(state_size());
                merge(total, state_in(part), rows_of(tile), a_.dim);
            }
            write(tile, total);
        }
    }

    int64_t rows_of(const Tile& tile) const { return tile.tokens * group_; }
    int64_t state_size() const { return MAX_ROWS * (a_.dim + 2); }
    State state_in(float* at) const { return {at, at + MAX_ROWS, at + 2 * MAX_ROWS}; }

    // States, then queries and keys.
    float* thread_memory(int states) const {
        static thread_local std::vector<float> memory;
        const size_t needed = size_t(states * state_size() + (MAX_ROWS + BLOCK) * a_.dim);
        if (memory.size() < needed) memory.resize(needed);
        return memory.data();
    }

    // Of nothing but the sinks, which are scores without a value.
    State fresh(float* at, const Tile& tile, bool with_sinks) const {
        const State state = state_in(at);
        const bool sinks = with_sinks && a_.sinks != nullptr;
        for (int64_t r = 0; r < rows_of(tile); r++) {
            state.largest[r] = sinks ? a_.sinks[tile.kv_head * group_ + r % group_] : -INFINITY;
            state.sum[r] = sinks ? 1.0f : 0.0f;
        }
        std::fill(state.out, state.out + rows_of(tile) * a_.dim, 0.0f);
        return state;
    }

    // What any token of a tile sees.
    Span seen_by(const Tile& tile) const {
        Span all = {tile.start + tile.length, 0};
        for (int64_t t = tile.token; t < tile.token + tile.tokens; t++) {
            const Span span = span_of(a_, tile, t);
            all = {std::min(all.begin, span.begin), std::max(all.end, span.end)};
        }
        return all;
    }

    Span parts_of(const Tile& tile) const {
        const Span all = seen_by(tile);
        return {all.begin / PART, (all.end + PART - 1) / PART};
    }

    State attend(const Tile& tile, int64_t part, float* at) const {
        const Span all = seen_by(tile);
        const Span span = {std::max(all.begin, part * PART), std::min(all.end, (part + 1) * PART)};
        float* q = thread_memory(2) + 2 * state_size();
        for (int64_t r = 0; r < rows_of(tile); r++) {
            const T* from = head_of(static_cast<const T*>(a_.q), tile, r);
            for (int64_t d = 0; d < a_.dim; d++) q[r * a_.dim + d] = to_float(from[d]) * a_.scale;
        }
        const State state = fresh(at, tile, false);
        attend_part<P>(a_, tile, q, span.begin, span.end, state, q + MAX_ROWS * a_.dim);
        return state;
    }

    template <class E>
    E* head_of(E* tensor, const Tile& tile, int64_t row) const {
        const int64_t token = tile.first_row + row / group_;
        return tensor + (token * a_.heads + tile.kv_head * group_ + row % group_) * a_.dim;
    }

    void write(const Tile& tile, State state) const {
        for (int64_t r = 0; r < rows_of(tile); r++) {
            T* out = head_of(static_cast<T*>(a_.out), tile, r);
            for (int64_t d = 0; d < a_.dim; d++)
                out[d] = from_float<T>(state.out[r * a_.dim + d] / state.sum[r]);
        }
    }

    const Attention& a_;
    const int64_t group_;
    std::vector<Tile> tiles_;
};

}  // namespace forerun

using namespace forerun;

#pragma GCC visibility push(default)
extern "C" void forerun_attention(const Attention* a, int32_t threads) {
    if (a->bfloat16_q)
        a->bfloat16_pool ? Work<BFloat16, BFloat16>(*a).run(threads)
                         : Work<BFloat16, float>(*a).run(threads);
    else
        a->bfloat16_pool ? Work<float, BFloat16>(*a).run(threads)
                         : Work<float, float>(*a).run(threads);
}
#pragma GCC visibility pop
