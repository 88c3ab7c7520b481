// The small kernels of a step: embedding rows, inputs of decode and verify passes, accept and
// commit, ring buffers. Reference implementations: `*_ref` in kernels/speculation.
#include <algorithm>
#include <cstdint>
#include <cstring>

#pragma GCC visibility push(default)
extern "C" {

// out[i] = table[ids[i]], rows of `bytes`. Ids outside of the table are taken as the nearest inside.
void forerun_take_rows(const void* table, const int64_t* ids, int64_t count, int64_t rows,
                       int64_t bytes, void* out, int32_t) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t id = std::clamp<int64_t>(ids[i], 0, rows - 1);
        std::memcpy(static_cast<char*>(out) + i * bytes,
                    static_cast<const char*>(table) + id * bytes, size_t(bytes));
    }
}

// In Python: `decode_inputs` in step.py.
struct DecodeInputs {
    const int64_t* slots;
    const int32_t* kv_len;
    const int64_t* last_token;
    const int32_t* page_table;
    int32_t* start;
    int64_t* last_token_out;
    int32_t* positions;
    int32_t* next_positions;
    int64_t* kv_slots;
    int32_t* page_table_out;
    int64_t batch, num_tokens, page_size, page_stride, pages;
};

void forerun_decode_inputs(const DecodeInputs* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t slot = a->slots[b];
        const int32_t start = a->kv_len[slot];
        const int32_t* table = a->page_table + slot * a->page_stride;
        a->start[b] = start, a->last_token_out[b] = a->last_token[slot];
        std::copy(table, table + a->pages, a->page_table_out + b * a->pages);
        for (int64_t i = 0; i < a->num_tokens; i++) {
            const int64_t position = start + i, at = b * a->num_tokens + i;
            a->positions[at] = int32_t(position), a->next_positions[at] = int32_t(position + 1);
            a->kv_slots[at] =
                table[position / a->page_size] * a->page_size + position % a->page_size;
        }
    }
}

// In Python: `kv_slots` in step.py. Every request has `num_tokens`.
struct KvSlots {
    const int32_t* page_table;
    const int32_t* start;
    int64_t* kv_slots;
    int64_t batch, num_tokens, page_size, page_stride;
};

void forerun_kv_slots(const KvSlots* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int32_t* table = a->page_table + b * a->page_stride;
        for (int64_t i = 0; i < a->num_tokens; i++) {
            const int64_t position = a->start[b] + i;
            a->kv_slots[b * a->num_tokens + i] =
                table[position / a->page_size] * a->page_size + position % a->page_size;
        }
    }
}

// `count` rows of `bytes`, between tensors whose rows begin at these strides (in bytes).
void forerun_copy_rows(const void* from, int64_t from_stride, int64_t count, int64_t bytes,
                       void* to, int64_t to_stride, int32_t) {
    for (int64_t i = 0; i < count; i++)
        std::memcpy(static_cast<char*>(to) + i * to_stride,
                    static_cast<const char*>(from) + i * from_stride, size_t(bytes));
}

// In Python: `verify_inputs` in step.py.
struct VerifyInputs {
    const int64_t* last_token;
    const int64_t* drafts;  // [B, num_drafts]
    const int64_t* slots;
    const int32_t* draft_limit;
    const int32_t* depth;  // [B, num_drafts] or null: a chain
    int64_t* input_ids;    // [B, num_drafts + 1]
    int64_t* candidates;   // [B, num_drafts]
    int64_t batch, num_drafts, drafts_stride, depth_stride, vocab_size;
};

void forerun_verify_inputs(const VerifyInputs* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t* ids = a->input_ids + b * (a->num_drafts + 1);
        ids[0] = std::clamp<int64_t>(a->last_token[b], 0, a->vocab_size - 1);
        for (int64_t i = 0; i < a->num_drafts; i++) {
            const int64_t draft = a->drafts[b * a->drafts_stride + i];
            const int64_t depth = a->depth ? a->depth[b * a->depth_stride + i] : i + 1;
            ids[i + 1] = std::clamp<int64_t>(draft, 0, a->vocab_size - 1);
            a->candidates[b * a->num_drafts + i] = depth <= a->draft_limit[a->slots[b]] ? draft : -1;
        }
    }
}

// In Python: `prompt_lookup` in step.py.
struct PromptLookup {
    const int32_t* history;  // [S, positions]
    const int64_t* slots;
    const int32_t* start;
    int64_t* drafts;  // [B, num_drafts]
    int64_t batch, num_drafts, history_stride, min_match, max_match;
};

void forerun_prompt_lookup(const PromptLookup* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int32_t* row = a->history + a->slots[b] * a->history_stride;
        const int64_t last = a->start[b];
        int64_t best = last - 1, longest = a->min_match - 1;  // else the last token is repeated
        for (int64_t position = last - 1; position >= 0 && longest < a->max_match; position--) {
            int64_t length = 0;
            while (length < a->max_match && length <= position &&
                   row[position - length] == row[last - length])
                length++;
            if (length > longest) longest = length, best = position;
        }
        for (int64_t i = 0; i < a->num_drafts; i++)
            a->drafts[b * a->num_drafts + i] = row[best + 1 + i % (last - best)];
    }
}

// In Python: `accept_commit` in step.py.
struct AcceptCommit {
    const int64_t* candidates;  // [B, W - 1]
    const int64_t* sampled;     // [B, W]
    const int64_t* slots;
    const int32_t* start;
    const int32_t* given;  // [B] num_committed, or null
    int32_t* kv_len;       // [S]
    int64_t* last_token;
    int32_t* history;
    int32_t* committed;  // [B]
    int64_t* ids;        // [B, W]
    int64_t batch, width, candidates_stride, sampled_stride, history_stride, padding_slot;
};

void forerun_accept_commit(const AcceptCommit* a, int32_t) {
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t* drafts = a->candidates + b * a->candidates_stride;
        const int64_t* sampled = a->sampled + b * a->sampled_stride;
        const int64_t slot = a->slots[b], start = a->start[b];
        int64_t* ids = a->ids + b * a->width;
        int64_t count = 1;
        if (a->given != nullptr)
            count = a->given[b];
        else
            while (count < a->width && drafts[count - 1] >= 0 &&
                   drafts[count - 1] == sampled[count - 1])
                count++;
        for (int64_t i = 0; i < a->width; i++) {
            ids[i] = std::max<int64_t>(sampled[i], 0);
            a->history[slot * a->history_stride + start + 1 + i] = int32_t(ids[i]);
        }
        a->committed[b] = int32_t(count);
        a->kv_len[slot] = int32_t(start + count);
        a->last_token[slot] = ids[count - 1];
    }
    a->kv_len[a->padding_slot] = 0;
}

// In Python: `ring_write` in step.py.
struct RingWrite {
    void* buffer;  // [S, capacity, ...] in rows of `bytes`
    const int64_t* slots;
    const int32_t* positions;
    const void* states;
    int64_t count, capacity, bytes, stride;  // stride of a state in bytes
};

void forerun_ring_write(const RingWrite* a, int32_t) {
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t row = a->slots[i] * a->capacity + a->positions[i] % a->capacity;
        std::memcpy(static_cast<char*>(a->buffer) + row * a->bytes,
                    static_cast<const char*>(a->states) + i * a->stride, size_t(a->bytes));
    }
}

// In Python: `ring_read` in step.py.
struct RingRead {
    const void* buffer;  // [S, capacity, ...] in rows of `bytes`
    const int64_t* slots;
    const int64_t* positions;  // [B, width]
    const bool* empty;         // [B, width]: zeros there
    void* states;              // [B, width, ...]
    int64_t batch, width, capacity, bytes;
};

void forerun_ring_read(const RingRead* a, int32_t) {
    for (int64_t i = 0; i < a->batch * a->width; i++) {
        char* to = static_cast<char*>(a->states) + i * a->bytes;
        if (a->empty[i]) {
            std::memset(to, 0, size_t(a->bytes));
            continue;
        }
        const int64_t row = a->slots[i / a->width] * a->capacity + a->positions[i] % a->capacity;
        std::memcpy(to, static_cast<const char*>(a->buffer) + row * a->bytes, size_t(a->bytes));
    }
}

}  // extern "C"
#pragma GCC visibility pop
