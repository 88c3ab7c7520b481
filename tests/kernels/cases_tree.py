"""Inputs of the verify pass, prompt lookup, draft trees, ring buffers, simulated acceptance."""

from __future__ import annotations

from forerun.kernels.speculation import (
    best_first,
    host_results,
    prompt_lookup,
    ragged,
    ring_buffer,
    suffix,
    tree,
    verify_inputs,
)
from forerun.speculative import simulate
from tests.kernels.compiled import Case

CASES = [
    *(
        Case(
            f"verify inputs, {'tree' if depth else 'chain'}",
            verify_inputs._build_verify_inputs,
            dict.fromkeys(("last_token", "drafts", "slots", "input_ids", "candidates"), "*i64")
            | dict.fromkeys(("draft_limit", "depth") if depth else ("draft_limit",), "*i32")
            | dict.fromkeys(("drafts_stride", "depth_stride", "vocab_size"), "i32"),
            ({} if depth else {"depth": None}) | {"NUM_TOKENS": 16, "BLOCK": 16},
            options={"num_warps": 1},
            wide=False,
        )
        for depth in (False, True)
    ),
    *(
        Case(
            f"rows of a ragged pass, {batch} x {width}",
            ragged._pack_tokens,
            dict.fromkeys(("widths", "positions", "first_out", "packed_positions"), "*i32")
            | dict.fromkeys(("ids", "candidates", "kv_slots", "places", "rows"), "*i64")
            | dict.fromkeys(("packed_ids", "packed_kv_slots"), "*i64")
            | {"num_rows": "i32", "batch": "i32"},
            {"NUM_TOKENS": width, "BATCH_BLOCK": batch, "BLOCK": width},
            options={"num_warps": 1},
            wide=False,
        )
        for batch, width in ((64, 8), (256, 16))
    ),
    *(
        Case(
            f"best_first {block}",
            best_first._best_first,
            {"scores": "*fp32", "ids": "*i64", "tokens": "*i64", "parents": "*i64"}
            | dict.fromkeys(("depth", "ranks", "nodes"), "i32"),
            {"BLOCK": block},
            options={"num_warps": 1},
            wide=False,
        )
        for block in (32, 64, 256)
    ),
    *(
        Case(
            f"log_probs {kind}",
            best_first._log_probs,
            {"logits": kind, "values": kind, "scores": "*fp32"}
            | dict.fromkeys(("row_stride", "vocab", "ranks"), "i32"),
            {"BLOCK": best_first.BLOCK_SIZE, "RANKS": 32},
            options={"num_warps": 8},
            multiples=("row_stride", "vocab"),
        )
        for kind in ("*bf16", "*fp32")
    ),
    *(
        Case(
            f"shape {block}",
            tree._tree_shape,
            {"parents": "*i64", "up_ptr": "*i64", "depth_ptr": "*i32", "ancestors_ptr": "*i64"}
            | {"parents_stride": "i32", "nodes": "i32"},
            {"BLOCK": block, "ROUNDS": block.bit_length() - 1, "WORDS": tree.mask_words(block)},
            options={"num_warps": warps},
            wide=False,
        )
        for block, warps in ((4, 1), (64, 1), (256, 4))
    ),
    *(
        Case(
            f"accept path {block}",
            tree._accept_path,
            dict.fromkeys(
                ("candidates", "sampled_ptr", "up_ptr", "ancestors_ptr", "path_ptr"), "*i64"
            )
            | {"depth_ptr": "*i32", "num_committed": "*i32"}
            | dict.fromkeys(("candidates_stride", "sampled_stride", "nodes"), "i32"),
            {"BLOCK": block, "WORDS": tree.mask_words(block)},
            options={"num_warps": warps},
            wide=False,
        )
        for block, warps in ((16, 1), (64, 4), (256, 8))
    ),
    *(
        Case(
            f"compact_kv {kind} {block}",
            tree._compact_kv,
            {"data": kind, "kv_slots": "*i64", "path_ptr": "*i64"}
            | {"layer_stride": "i64", "nodes": "i32"},
            {"SIZE": 1024, "BLOCK": block, "CHUNK": tree.TILE // block},
            options={"num_warps": 4},
            multiples=("layer_stride",),
        )
        for kind in ("*bf16", "*u8", "*fp32")
        for block in (16, 64, 256)
    ),
    *(
        Case(
            f"ring buffer {kind}",
            ring_buffer._ring_buffer_write,
            {"buffer": kind, "slots": "*i64", "positions": "*i32", "values": kind}
            | {"ring_size": "i32", "size": "i32"},
            {"BLOCK": ring_buffer.BLOCK_SIZE},
            multiples=("size",),
        )
        for kind in ("*bf16", "*fp32")
    ),
    *(
        Case(
            f"tokens to the host, {batch} x {width}",
            host_results._store_results,
            {"sampled": "*i64", "num_committed": "*i32", "count": "*i64", "ring": "*i64"},
            {"BATCH": batch, "TOKENS": batch * width, "RING": 4, "BLOCK_B": batch}
            | {"BLOCK": min(batch * width, host_results.BLOCK)},
            options={"num_warps": 1},
            wide=batch > 1,  # a few tokens are no 16 bytes
        )
        for batch, width in ((1, 1), (32, 16), (64, 256))
    ),
    *(
        Case(
            f"longest matches, {'texts of all' if shared else 'own text'}",
            prompt_lookup._longest_matches,
            {"history": "*i32", "slots": "*i64", "start": "*i32", "tokens": "*i32", "best": "*i64"}
            | dict.fromkeys(("lengths", "group", "groups") if shared else (), "*i32")
            | dict.fromkeys(("stride", "parts", "part_size", "min_match", "max_match"), "i32"),
            ({} if shared else dict.fromkeys(("lengths", "group", "groups")))
            | {"SHARED": shared, "BLOCK": suffix.TEXT_TOKENS if shared else prompt_lookup.BLOCK},
            options={"num_warps": 4},
            wide=False,
        )
        for shared in (False, True)
    ),
    Case(
        "the majority of the best matches",
        suffix._vote,
        dict.fromkeys(("lengths", "following", "limits"), "*i32")
        | {"last": "*i64", "tokens": "*i64", "confidence": "*fp32"}
        | dict.fromkeys(("depth", "min_prob", "num_drafts"), "i32"),
        {"VOTES": suffix.MAX_VOTES, "DRAFTS": 16, "ONE": suffix.ONE},
        options={"num_warps": 1},
        wide=False,
    ),
    *(
        Case(
            f"{drafts} drafts behind the best match",
            prompt_lookup._copy_drafts,
            {"history": "*i32", "slots": "*i64", "start": "*i32", "best": "*i64", "drafts": "*i64"}
            | dict.fromkeys(("history_stride", "parts", "num_drafts"), "i32"),
            {"PARTS": parts, "DRAFTS": drafts},
            options={"num_warps": 1},
            wide=False,
        )
        for parts, drafts in ((1, 1), (64, 16))
    ),
    *(
        Case(
            f"simulated acceptance{', by chance' if by_chance else ''}",
            simulate._simulate,
            {"slots": "*i64", "steps_ptr": "*i64", "mean_ptr": "*i64", "out": "*i32"}
            | {"num_verify_tokens": "i32", "num_drafts": "i32"}
            | ({"survival": "*fp32"} if by_chance else {}),
            {"FRACTION_BITS": 32, "ROUNDING": 1 << 16, "DRAFTS": 16}
            | {"FIRST": simulate._FIRST, "SECOND": simulate._SECOND, "SLOT": simulate._SLOT}
            | {"OFFSET": simulate._OFFSET}
            | ({} if by_chance else {"survival": None}),
            options={"num_warps": 1},
            wide=False,
        )
        for by_chance in (False, True)
    ),
]
