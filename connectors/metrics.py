"""The names under which engines show what the two halves count.

Promise: every number is a sum over an interval or since the start, so that adding intervals, ranks and halves is always right.
"""

from __future__ import annotations

# Counter of the two halves -> metric, its label, the label's value.
METRICS: dict[str, tuple[str, str, str]] = {
    "prompt_tokens": ("tokens", "source", "prompt"),
    "local_tokens": ("tokens", "source", "local_hit"),
    "loaded_tokens": ("tokens", "source", "loaded"),
    "loaded_tokens_dram": ("loaded_tokens", "tier", "dram"),
    "loaded_tokens_ssd": ("loaded_tokens", "tier", "ssd"),
    "loaded_tokens_pool": ("loaded_tokens", "tier", "pool"),
    "misses": ("no_load", "reason", "miss"),
    "timeouts": ("no_load", "reason", "timeout"),
    "loads_cut": ("failures", "what", "load_slower_than_prefill"),
    "node_away": ("no_load", "reason", "node_away"),
    "window_full": ("no_load", "reason", "staging_window_full"),
    "failed_keys_avoided": ("no_load", "reason", "failed_before"),
    "skipped_prompt_embeds": ("no_load", "reason", "prompt_embeds"),
    "skipped_media": ("no_load", "reason", "media"),
    "skipped_migrated": ("no_load", "reason", "migrated"),
    "skipped_streaming_input": ("no_load", "reason", "streaming_input"),
    "skipped_lora_without_path": ("no_load", "reason", "lora_without_path"),
    "skipped_media_without_hash": ("no_load", "reason", "media_without_hash"),
    "skipped_lora_unreadable": ("no_load", "reason", "lora_unreadable"),
    "skipped_other_weights": ("no_load", "reason", "other_weights"),
    "skipped_worker_unable": ("no_load", "reason", "worker_unable"),
    "saved_pages": ("pages", "event", "saved"),
    "discarded_pages": ("pages", "event", "discarded"),
    "saves_without_slot": ("pages", "event", "no_free_slot"),
    "failed_loads": ("failures", "what", "load"),
    "failed_saves": ("failures", "what", "save"),
    "loaded_bytes": ("bytes", "direction", "in"),
    "saved_bytes": ("bytes", "direction", "out"),
    "load_us": ("copy_microseconds", "direction", "in"),
    "save_us": ("copy_microseconds", "direction", "out"),
}
HELP = {
    "tokens": "Prompt tokens of started requests: all, found in the engine's own prefix cache, loaded by mooncake-kv.",
    "loaded_tokens": "Prompt tokens loaded by mooncake-kv, by the tier that had them.",
    "no_load": "Requests that loaded nothing, by reason.",
    "pages": "Pages saved, discarded before anybody could see them, and not saved for want of a slot (attempts).",
    "failures": "Copies that failed and were recomputed or dropped; loads cut because computing is faster.",
    "bytes": "KV bytes copied into (in) and out of (out) the engine's blocks.",
    "copy_microseconds": "Time spent copying on the engine's threads.",
    "call_microseconds": "Time spent inside the connector's calls on the engine's threads.",
}
