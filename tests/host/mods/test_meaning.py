"""Each mod against its formula written another way, its tables against published values, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from flexbwd import mods
from flexbwd.errors import ConfigError, ShapeError
from flexbwd.reference import attention_reference, kept_elements
from flexbwd.testing import make_case


def grid(mask, q, kv, batch=1, heads=1):
    return kept_elements((batch, heads, q, kv), mask)


def by_formula(q, kv, rule):
    return torch.tensor([[bool(rule(i, j)) for j in range(kv)] for i in range(q)])


def modified(mod, q, kv, batch=1, heads=1, score=0.7):
    """s' for a constant score, read off the LSE of single keys: [B, H, q, kv]."""
    case = make_case((q, kv), heads=heads, head_dim=1, batch=batch)
    query, key = torch.full_like(case.query, score), torch.ones_like(case.key)
    columns = []
    for j in range(kv):
        keep = torch.arange(kv) == j
        columns.append(attention_reference(query, key, case.value, mod, scale=1.0, keep=keep)[1])
    return torch.stack(columns, -1)


MASK_RULES = {
    "causal": (mods.causal, lambda i, j: j <= i),
    "causal_offset": (mods.causal_offset(-3), lambda i, j: j <= i - 3),
    "sliding_window": (mods.sliding_window(4), lambda i, j: i - 4 <= j <= i),
    "window of the own key": (mods.sliding_window(0), lambda i, j: i == j),
    "symmetric_window": (mods.symmetric_window(3), lambda i, j: abs(i - j) <= 3),
    "dilated_window": (mods.dilated_window(7, 3), lambda i, j: abs(i - j) in (0, 3, 6)),
    "prefix_lm": (mods.prefix_lm(5), lambda i, j: j < max(5, i + 1)),
    "attention_sink": (mods.attention_sink(2, 3), lambda i, j: j <= i and (j in (0, 1) or j >= i - 3)),
    "chunked_causal": (mods.chunked_causal(6), lambda i, j: j in range(i // 6 * 6, i + 1)),
    "frame_causal": (mods.frame_causal(5), lambda i, j: j < (i // 5 + 1) * 5),
    "document": (mods.document(torch.arange(24) // 7), lambda i, j: i // 7 == j // 7),
    "scattered documents": (mods.document(torch.arange(24) % 3), lambda i, j: (i - j) % 3 == 0),
    "document_causal": (mods.document_causal(torch.arange(24) // 7), lambda i, j: j <= i < (j // 7 + 1) * 7),
    "block_diffusion": (
        mods.block_diffusion(10, 4),
        lambda i, j: (
            (
                (i < 10 and j < 10 and i // 4 == j // 4)
                or (i < 10 <= j and (j - 10) // 4 < i // 4)
                or (i >= 10 and j >= 10 and (j - 10) % 10 // 4 <= (i - 10) % 10 // 4)
            )
            if max(i, j) < 20
            else None
        ),
    ),
}


@pytest.mark.parametrize("name", MASK_RULES)
def test_masks_equal_their_rule(name):
    mask, rule = MASK_RULES[name]
    size = 20 if name == "block_diffusion" else 24
    assert torch.equal(grid(mask, size, size)[0, 0], by_formula(size, size, rule))


def test_document_intervals_are_the_ids_also_with_empty_documents():
    offsets = torch.tensor([0, 3, 3, 10, 11, 24])
    ids = torch.tensor([0] * 3 + [2] * 7 + [3] + [4] * 13)
    assert torch.equal(mods.document_ids(offsets).long(), ids)
    for interval, plain in (
        (mods.document_interval, mods.document),
        (mods.document_interval_causal, mods.document_causal),
    ):
        assert torch.equal(grid(interval(offsets), 24, 24), grid(plain(ids), 24, 24))


def test_per_batch_forms_read_their_row():
    ids = torch.stack([torch.arange(12) // 4, torch.arange(12) // 5])
    for per_batch in (mods.document, mods.document_causal):
        got = grid(per_batch(ids), 12, 12, batch=2)
        assert torch.equal(got, torch.cat([grid(per_batch(row), 12, 12) for row in ids]))
    lengths = torch.tensor([0, 7])
    got = grid(mods.prefix_lm(lengths), 12, 12, batch=2)
    assert torch.equal(got, torch.cat([grid(mods.prefix_lm(int(n)), 12, 12) for n in lengths]))


def test_padding_keeps_the_tokens_on_its_side():
    lengths = torch.tensor([0, 3, 8])
    right, left = grid(mods.padding_right(lengths), 2, 8, 3), grid(mods.padding_left(lengths, 8), 2, 8, 3)
    assert right[:, 0].sum(-1).tolist() == [[0, 0], [3, 3], [8, 8]]
    assert torch.equal(left, right.flip(-1))


def test_global_tokens_see_and_are_seen():
    is_global = torch.zeros(16, dtype=torch.bool)
    is_global[[0, 9]] = True
    got = grid(mods.global_tokens(is_global, 1), 16, 16)[0, 0]
    assert got[9].all()
    assert got[:, 9].all()
    assert got[5].nonzero().flatten().tolist() == [0, 4, 5, 6, 9]


def test_natten_gives_every_query_the_whole_kernel():
    got = grid(mods.natten_2d((5, 7), (3, 5)), 35, 35)[0, 0]
    assert (got.sum(-1) == 15).all()
    corner = got[0].view(5, 7)
    assert corner[:3, :5].all()
    middle = got[2 * 7 + 3].view(5, 7)
    assert middle[1:4, 1:6].all()


def test_sta_keeps_whole_tiles_and_the_same_number_for_every_query():
    got = grid(mods.sta((4, 6, 4), (2, 6, 2), (2, 2, 2), text=3), 99, 99)[0, 0]
    assert (got[:96].sum(-1) == 2 * 6 * 2 + 3).all()
    tiles = got[:96, :96].view(12, 8, 12, 8)
    assert torch.equal(tiles.any(3).any(1), tiles.all(3).all(1))
    assert got[96:].all()


def test_tree_verification_sees_the_prefix_and_the_path():
    ancestors = mods.tree_ancestors([-1, 0, 0, 1, 2])
    got = grid(mods.tree_verification(ancestors, 3), 5, 8)[0, 0]
    assert got[:, :3].all()
    assert [row.nonzero().flatten().tolist() for row in got[:, 3:]] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]


def test_shared_prefix_equals_one_causal_sequence_per_answer():
    offsets, prefix_of = torch.tensor([0, 4, 7, 12, 14, 20]), torch.tensor([0, 0, 0, 3, 3])
    got = grid(mods.shared_prefix(offsets, prefix_of), 20, 20)[0, 0]
    assert got[5].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert got[8].nonzero().flatten().tolist() == [0, 1, 2, 3, 7, 8]
    assert got[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert got[15].nonzero().flatten().tolist() == [12, 13, 14, 15]


# -- scores -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "slopes"),
    [(8, [2.0**-n for n in range(1, 9)]), (4, [2.0 ** (-2 * n) for n in range(1, 5)]), (1, [2.0**-8])],
)
def test_alibi_slopes_of_a_power_of_two(heads, slopes):
    bias = modified(mods.alibi(heads), 3, 4, heads=heads) - 0.7
    distance = torch.arange(4) - torch.arange(3)[:, None]
    torch.testing.assert_close(bias[0], torch.tensor(slopes).double()[:, None, None] * distance)


def test_alibi_slopes_of_other_head_counts_interleave():
    got = (modified(mods.alibi(12), 1, 2, heads=12)[0, :, 0, 1] - 0.7).tolist()
    eight, sixteen = [2.0**-n for n in range(1, 9)], [2.0 ** (-n / 2) for n in range(1, 17)]
    assert got == pytest.approx(eight + sixteen[0::2][:4])


def t5_formula(shift, buckets, bidirectional, max_distance):
    """As written in the paper's code, one number at a time."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if shift > 0 else 0
        distance = abs(shift)
    else:
        distance = max(-shift, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    steps = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
    return offset + min(exact + int(steps + 1e-6), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 64), (8, 20), (16, 100)])
def test_t5_buckets_follow_the_formula_and_saturate(bidirectional, buckets, max_distance):
    got = mods.t5_buckets(buckets, bidirectional, max_distance).tolist()
    shifts = range(-max_distance, max_distance + 1)
    assert got == [t5_formula(s, buckets, bidirectional, max_distance) for s in shifts]
    table = torch.arange(float(buckets))[None]
    far = modified(mods.t5_bias(table, bidirectional, max_distance), 3 * max_distance, 1) - 0.7
    want = [t5_formula(-i, buckets, bidirectional, max_distance) for i in range(3 * max_distance)]
    assert far.flatten().round().int().tolist() == want


def test_additive_tables_are_read_where_they_say():
    b, h, q, kv = 2, 3, 4, 5
    ramp = torch.arange(200.0, dtype=torch.float64)
    i, j = torch.arange(q)[:, None], torch.arange(kv)
    full = (b, h, q, kv)
    cases = [
        (mods.head_bias(ramp[:3]), ramp[:3, None, None].expand(full)),
        (mods.key_bias(ramp[:5]), ramp[:5].expand(full)),
        (mods.key_bias(ramp[:10].view(2, 5)), ramp[:10].view(2, 1, 1, 5).expand(full)),
        (mods.batch_bias(ramp[:6].view(2, 3)), ramp[:6].view(2, 3, 1, 1).expand(full)),
        (mods.pair_bias(ramp[:20].view(4, 5)), ramp[:20].view(4, 5).expand(full)),
        (mods.pair_bias(ramp[:60].view(3, 4, 5)), ramp[:60].view(3, 4, 5).expand(full)),
        (mods.pair_bias(ramp[:120].view(full)), ramp[:120].view(full)),
        (mods.relative_table(ramp[:9]), ramp[i - j + 4].expand(full)),
        (mods.relative_table(ramp[:27].view(3, 9)), ramp[:27].view(3, 9)[:, i - j + 4].expand(full)),
        (mods.relative_bias(0.5), (0.5 * (i - j)).expand(full)),
        (mods.alibi_learned(ramp[:3]), (ramp[:3, None, None] * (j - i)).expand(full)),
    ]
    for mod, want in cases:
        torch.testing.assert_close(modified(mod, q, kv, b, h) - 0.7, want.double(), msg=mod.__name__)


def test_multiplicative_mods_equal_their_formula():
    t = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)
    i = torch.arange(4)[:, None]
    torch.testing.assert_close(
        modified(mods.ssmax(t), 4, 5, 1, 3)[0], (t[:, None, None] * torch.log(i + 1.0).double() * 0.7).expand(3, 4, 5),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    torch.testing.assert_close(
        modified(mods.head_temperature(t), 4, 5, 1, 3)[0], (0.7 / t)[:, None, None].expand(3, 4, 5)
    )
    gate = torch.linspace(-3, 3, 15, dtype=torch.float64).view(3, 5)
    got = modified(mods.sigmoid_gate(gate), 4, 5, 1, 3)[0]
    torch.testing.assert_close(got, (0.7 * torch.sigmoid(gate))[:, None].expand(3, 4, 5))
    assert modified(mods.softcap(2.0), 1, 1).item() == pytest.approx(2 * math.tanh(0.35))


def test_sandwich_is_the_product_of_sinusoidal_embeddings():
    width, length, heads = 16, 20, 3
    frequency = 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    angle = torch.arange(length).double()[:, None] * frequency
    embedding = torch.cat([angle.sin(), angle.cos()], -1)
    want = embedding @ embedding.T / (8 * torch.arange(1, heads + 1) / heads)[:, None, None]
    got = modified(mods.sandwich(heads, length, width), length, length, heads=heads)[0] - 0.7
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_graph_distances_are_hops():
    ring = torch.zeros(1, 6, 6)
    for n in range(6):
        ring[0, n, (n + 1) % 6] = ring[0, (n + 1) % 6, n] = 1
    assert mods.graph_distances(ring, 2)[0, 0].tolist() == [0, 1, 2, 3, 2, 1]
    assert mods.graph_distances(ring, 5)[0, 0].tolist() == [0, 1, 2, 3, 2, 1]
    assert mods.graph_distances(torch.zeros(2, 3, 3), 4)[1].tolist() == [[0, 5, 5], [5, 0, 5], [5, 5, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.sliding_window(-1), "window=-1 must be at least 0"),
        (lambda: mods.symmetric_window(-2), "radius=-2 must be at least 0"),
        (lambda: mods.dilated_window(3, 0), "dilation=0 at least 1"),
        (lambda: mods.chunked_causal(0), "chunk=0 must be at least 1"),
        (lambda: mods.frame_causal(0), "tokens_per_frame=0 must be at least 1"),
        (lambda: mods.natten_2d((8, 8), (4, 3)), r"kernel=\(4, 3\) must be odd"),
        (lambda: mods.natten_2d((2, 8), (3, 3)), r"not larger than canvas=\(2, 8\)"),
        (lambda: mods.sta((4, 6, 4), (2, 6, 2), (2, 4, 2)), r"tile=\(2, 4, 2\) must divide"),
        (lambda: mods.block_diffusion(0, 4), "length=0"),
        (lambda: mods.softcap(0.0), "cap=0.0 must be positive"),
        (lambda: mods.alibi(0), "heads=0 must be at least 1"),
        (lambda: mods.sandwich(4, 10, 5), "width=5 even"),
        (lambda: mods.t5_buckets(2, True, 128), "buckets=2"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_setting_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.alibi_learned(torch.ones(2, 2)), r"slopes has shape \(2, 2\)"),
        (lambda: mods.relative_table(torch.ones(4, 8)), r"table has shape \(4, 8\)"),
        (lambda: mods.head_bias(torch.ones(())), r"bias has shape \(\)"),
        (lambda: mods.pair_bias(torch.ones(3)), r"bias has shape \(3,\)"),
        (lambda: mods.t5_bias(torch.ones(3)), r"table has shape \(3,\)"),
        (lambda: mods.ssmax(torch.ones(1, 3)), r"scale has shape \(1, 3\)"),
        (lambda: mods.head_temperature(torch.ones(1, 3)), r"temperature has shape \(1, 3\)"),
        (lambda: mods.sigmoid_gate(torch.ones(3)), r"gate has shape \(3,\)"),
        (lambda: mods.graphormer(torch.ones(2, 3), torch.ones(4, 4)), r"distance \(4, 4\)"),
        (lambda: mods.document(torch.ones(1, 1, 1)), r"ids has shape \(1, 1, 1\)"),
        (lambda: mods.document_interval(torch.tensor([0])), r"offsets has shape \(1,\)"),
        (lambda: mods.shared_prefix(torch.tensor([0, 4, 8]), torch.tensor([0])), r"each of the 2 documents"),
        (lambda: mods.tree_verification(torch.ones(2, 3), 0), r"ancestors has shape \(2, 3\)"),
        (lambda: mods.tree_ancestors([-1, 2, 1]), r"parents\[1\] = 2"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_shape_is_named(make, message):
    with pytest.raises(ShapeError, match=message):
        make()
