"""The zoo: attention masks and score modifications as small torch functions, one idea per file.

    from flexbwd import flex_attention, mods

    out = flex_attention(q, k, v, score_mod=mods.softcap(30.0), mask_mod=mods.sliding_window(1024))

`names()` lists them, `get(name)` tells formula and source and builds an example.
"""

from .alibi import alibi, alibi_learned
from .attention_sink import attention_sink
from .block_diffusion import block_diffusion
from .causal import causal, causal_offset
from .chunked_causal import chunked_causal
from .dilated_window import dilated_window
from .document import document, document_causal
from .document_interval import document_bounds, document_ids, document_interval, document_interval_causal
from .frame_causal import frame_causal
from .global_tokens import global_tokens
from .graphormer import graph_distances, graphormer
from .learned_bias import batch_bias, head_bias, key_bias, pair_bias
from .natten_2d import natten_2d
from .padding import padding_left, padding_right
from .prefix_lm import prefix_lm
from .registry import ZooEntry, get, names, zoo
from .relative_bias import relative_bias, relative_table
from .sandwich import sandwich
from .shared_prefix import shared_prefix
from .sigmoid_gate import sigmoid_gate
from .signatures import MaskMod, ScoreMod
from .sliding_window import sliding_window
from .softcap import softcap
from .ssmax import ssmax
from .sta import sta
from .symmetric_window import symmetric_window
from .t5_bias import t5_bias, t5_buckets
from .temperature import head_temperature
from .tree_verification import tree_ancestors, tree_verification

__all__ = [
    "MaskMod",
    "ScoreMod",
    "ZooEntry",
    "alibi",
    "alibi_learned",
    "attention_sink",
    "batch_bias",
    "block_diffusion",
    "causal",
    "causal_offset",
    "chunked_causal",
    "dilated_window",
    "document",
    "document_bounds",
    "document_causal",
    "document_ids",
    "document_interval",
    "document_interval_causal",
    "frame_causal",
    "get",
    "global_tokens",
    "graph_distances",
    "graphormer",
    "head_bias",
    "head_temperature",
    "key_bias",
    "names",
    "natten_2d",
    "padding_left",
    "padding_right",
    "pair_bias",
    "prefix_lm",
    "relative_bias",
    "relative_table",
    "sandwich",
    "shared_prefix",
    "sigmoid_gate",
    "sliding_window",
    "softcap",
    "ssmax",
    "sta",
    "symmetric_window",
    "t5_bias",
    "t5_buckets",
    "tree_ancestors",
    "tree_verification",
    "zoo",
]
