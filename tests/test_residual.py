"Placements of the norm: what the chapter does not show"
import pytest
import torch
import torch.nn as nn

from stabbook.attention import Attention
from stabbook.embedding import Embedding
from stabbook.mlp import MLP
from stabbook.model import Decoder, ModelConfig, normalise_weights_
from stabbook.norms import L2Norm, LayerNorm, LearnedScale, RMSNorm
from stabbook.reparam import LayerScale
from stabbook.residual import (ALIASES, PLACEMENTS, RESIDUALS, Beside, Block, DeepNorm,
                               ParallelBlock, Residual, ResidualRule, make_residual,
                               placement)

D = 24


@pytest.fixture
def parts():
    "Branches, a stream, and norms with random gains, so that mistaking one shows"
    torch.manual_seed(0)
    made = []

    def make():
        n = RMSNorm(D, 1e-6)
        nn.init.uniform_(n.weight, 0.5, 1.5)
        made.append(n)
        return n
    return nn.Linear(D, D), nn.Linear(D, D), 3 * torch.randn(2, 5, D), make, made


FORMULAS = {
    "pre": lambda h, f, n: h + f(n[0](h)),
    "post": lambda h, f, n: n[0](h + f(h)),
    "reordered": lambda h, f, n: h + n[0](f(h)),
    "sandwich": lambda h, f, n: h + n[1](f(n[0](h))),
    "none": lambda h, f, n: h + f(h),
}


@pytest.mark.parametrize("name", [*PLACEMENTS, *ALIASES])
def test_placement_is_its_formula(parts, name):
    f, _, h, make, made = parts
    block = Residual(f, make, name)
    assert torch.equal(block(h), FORMULAS[placement(name)](h, f, made))
    assert len(made) == {"none": 0, "sandwich": 2}.get(placement(name), 1)


@pytest.mark.parametrize("first", PLACEMENTS)
@pytest.mark.parametrize("second", PLACEMENTS)
def test_block_places_each_branch_on_its_own(parts, first, second):
    f, g, h, make, made = parts
    block = Block(f, g, make, attention_norm_placement=first, mlp_norm_placement=second)
    used = {"none": 0, "sandwich": 2}.get(first, 1)
    middle = FORMULAS[first](h, f, made[:used])
    assert torch.equal(block(h), FORMULAS[second](middle, g, made[used:]))


def test_parallel_shares_one_norm_and_adds_both(parts):
    f, g, h, make, made = parts
    block = ParallelBlock(f, g, make)
    torch.testing.assert_close(block(h), h + f(made[0](h)) + g(made[0](h)))
    assert len(made) == 1


def test_scale_acts_on_the_branch_last(parts):
    f, g, h, make, made = parts
    scale = LayerScale(D, 0.25)
    block = Residual(f, make, "sandwich", scale)
    assert torch.equal(block(h), h + 0.25 * made[1](f(made[0](h))))
    both = ParallelBlock(f, g, make, make_scale=lambda: LayerScale(D, 0.25))
    torch.testing.assert_close(both(h), h + 0.25 * (f(made[2](h)) + g(made[2](h))))


def test_branch_gets_the_arguments(parts):
    _, g, h, make, _ = parts

    class Attention(nn.Module):
        def forward(self, x, rope, mask): return x * rope + mask
    for block in (Block(Attention(), g, make), ParallelBlock(Attention(), g, make)):
        assert not torch.equal(block(h, 2.0, 1.0), block(h, 3.0, 1.0))


@pytest.mark.parametrize("name", ["Pre", "postnorm", "", None, 3, True, "sandwhich"])
def test_unknown_placement(name):
    with pytest.raises(ValueError, match="norm_placement=.* is not one of 'pre'"):
        Residual(nn.Identity(), lambda: RMSNorm(D), name)


def test_one_branch_cannot_be_parallel():
    with pytest.raises(ValueError, match="norm_placement='parallel'"):
        Residual(nn.Identity(), lambda: RMSNorm(D), "parallel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*PLACEMENTS, "parallel"])
def test_every_dtype_and_view(name, dtype):
    f, g, norm = nn.Linear(D, D), nn.Linear(D, D), lambda: LayerNorm(D)
    block = ParallelBlock(f, g, norm) if name == "parallel" else Block(
        f, g, norm, attention_norm_placement=name, mlp_norm_placement=name)
    block, h = block.to(dtype), torch.randn(5, 2, D, dtype=dtype).transpose(0, 1)
    y = block(h)
    assert y.dtype == dtype
    loose = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, block(h.contiguous()), rtol=loose, atol=loose)


def test_zero_branch_before_a_norm_has_a_gradient_of_one_over_root_eps():
    for eps in (1e-4, 1e-6, 1e-8):
        grads = []
        for name in ("pre", "reordered"):
            last = nn.Linear(D, D, bias=False).double()
            nn.init.zeros_(last.weight)
            h = torch.randn(3, D, generator=torch.Generator().manual_seed(0)).double()
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
            norm = RMSNorm(D, eps) if name == "reordered" else nn.Identity()
            Residual(last, lambda: norm.double(), name)(h).sum().backward()
            grads.append(last.weight.grad.norm())
        assert (grads[1] / grads[0]).item() == pytest.approx(eps ** -0.5, rel=1e-6)


class Product(nn.Module):
    def forward(self, x, y): return x * y.abs()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_branch_beside_another_reads_the_stream(name):
    f, h, norm = nn.Linear(D, D), torch.randn(3, D), lambda: LayerNorm(D, 1e-5)
    N = norm()
    y = f(N(h) if name in ("pre", "sandwich") else h)
    y = N(y) + N(N(h) * h.abs())
    if name in ("reordered", "sandwich"): y = N(y)
    want = N(h + y) if name == "post" else h + y
    got = Residual(f, norm, name, beside=Beside(Product(), norm))(h)
    torch.testing.assert_close(got, want)
    block = Block(nn.Identity(), f, norm, attention_norm_placement="none",
                  mlp_norm_placement=name, beside=Product())
    torch.testing.assert_close(block(h / 2), want)
    with pytest.raises(ValueError, match="'ngpt' must be left out: .* beside the MLP"):
        Block(f, f, norm, mlp_norm_placement="ngpt", beside=Product())


@pytest.mark.parametrize("kind", [Block, ParallelBlock])
def test_blocks_end_with_the_layers_own_embedding_and_a_scalar(kind):
    f, g, norm = nn.Linear(D, D), nn.Linear(D, D), lambda: LayerNorm(D, 1e-5)
    scale = lambda: LayerScale(D, 0.5)
    plain = kind(f, g, norm, make_scale=scale)
    block = kind(f, g, norm, make_scale=scale, per_layer=Product(), scalar=True)
    h, e = torch.randn(3, D), torch.randn(3, D)
    block.scalar.fill_(0.25)
    y = plain(h)
    want = (y + 0.5 * norm()(y * e.abs())) / 4
    torch.testing.assert_close(block(h, per_layer_input=e), want)


# --- rules of one's own

class Streams(Residual):  # Hyper-connections at their simplest: n streams
    n = 3

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.read = LearnedScale(self.n, init=1 / self.n)
        self.write = LearnedScale(self.n)

    def open(self, x): return torch.stack([x] * self.n, -2)
    def close(self, stream): return stream.mean(-2)
    def split(self, stream):
        return super().split((stream * self.read()[:, None]).sum(-2))
    def merge(self, stream, y): return stream + self.write()[:, None] * y[..., None, :]


class ByDepth(Residual):  # A rule that asks where it stands
    def __init__(self, *args, layer=0, depth=1, **how):
        super().__init__(*args, **how)
        self.factor = (layer + 1) ** -0.5

    def split(self, stream): return self.factor * super().split(stream)


@pytest.fixture
def entry():
    "Add rules to the table for one test."
    before = dict(RESIDUALS)
    yield RESIDUALS.__setitem__
    RESIDUALS.clear(), RESIDUALS.update(before)


class Small(nn.Module):
    "Two blocks between an embedding and a head, as the decoder walks them."
    def __init__(self, place, norm=lambda: RMSNorm(D), depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = Embedding(11, D), nn.Linear(D, 11)
        self.layers = nn.ModuleList(
            Block(Attention(D, 2), MLP(D, 2 * D), norm, attention_norm_placement=place,
                  mlp_norm_placement=place, layer=i, depth=depth) for i in range(depth))

    def forward(self, ids):
        x = self.layers[0].open(self.embedding(ids))
        for layer in self.layers: x = layer(x)
        return self.head(self.layers[-1].close(x))


def trained(model, steps=40):
    "Losses of learning one fixed sequence, and which parameters have moved."
    ids = torch.arange(60).view(2, 30) * 7 % 11
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimiser, losses = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
        optimiser.zero_grad(), loss.backward(), optimiser.step()
        losses.append(loss.item())
    return losses, {n for n, p in model.named_parameters()
                    if not torch.equal(p, before[n])}


@pytest.mark.parametrize("rule", [Streams, ByDepth, ResidualRule])
def test_a_rule_from_outside_is_one_entry_and_trains(entry, rule):
    if rule is ResidualRule:  # The plainest object that fits the seam
        rule = lambda branch, make_norm, scale=None, beside=None, layer=0, depth=1: (
            ResidualRule(branch, scale, beside))
    with pytest.raises(ValueError, match="'mine' is not one of"): placement("mine")
    entry("mine", rule)
    assert placement("mine") == "mine"
    losses, moved = trained(model := Small("mine"))
    assert losses[0] > 2 and losses[-1] < losses[0] / 4
    assert moved == {n for n, _ in model.named_parameters()}


def test_streams_are_opened_once_and_closed_once(entry):
    entry("mine", Streams)
    model, x = Small("mine"), torch.randn(2, 5, D)
    stream = model.layers[0].open(x)
    assert stream.shape == (2, 5, 3, D) and torch.equal(stream[..., 1, :], x)
    assert model.layers[0](stream).shape == stream.shape
    torch.testing.assert_close(model.layers[-1].close(stream), x)
    # Equal streams with weights of one are the plain residual of each
    twin = Small("pre")
    twin.load_state_dict(model.state_dict(), strict=False)
    ids = torch.arange(8).view(1, 8)
    torch.testing.assert_close(model(ids), twin(ids))


def test_rules_that_shape_the_stream_differently_do_not_meet(entry, parts):
    entry("mine", Streams)
    f, g, _, make, _ = parts
    for how in (dict(attention_norm_placement="mine"), dict(mlp_norm_placement="mine"),
                dict(attention_norm_placement="mine", mlp_norm_placement="mine",
                     per_layer=Product())):
        with pytest.raises(ValueError, match="must shape the stream alike.*Streams"):
            Block(f, g, make, **how)


def test_a_rule_is_told_its_layer_and_the_depth(entry):
    entry("mine", ByDepth)
    model = Small("mine", depth=4)
    for i, layer in enumerate(model.layers):
        assert layer.attention.factor == layer.mlp.factor == (i + 1) ** -0.5
    deep = Small("deepnorm", depth=4)
    assert {layer.mlp.alpha for layer in deep.layers} == {8 ** 0.25}


# --- DeepNorm, and every name in the table

def test_deepnorm_is_its_formula(parts):
    f, g, h, make, made = parts
    rule = make_residual("deepnorm", f, make, depth=80, scale=LayerScale(D, 0.5))
    assert isinstance(rule, DeepNorm)
    assert rule.alpha == pytest.approx(3.5565588200778455)
    want = made[0](160 ** 0.25 * h + 0.5 * f(h))
    torch.testing.assert_close(rule(h), want)
    assert not torch.allclose(rule(h), made[0](h + 0.5 * f(h)), atol=0.01)
    both = make_residual("deepnorm", f, make, depth=80, beside=Beside(Product(), make))
    y = made[1](f(h)) + made[3](made[2](h) * h.abs())
    torch.testing.assert_close(both(h), made[4](160 ** 0.25 * h + y))


def test_a_post_norm_stream_forgets_the_size_of_what_came():
    "Rules with a norm on the stream, told from rules with a norm on the branch."
    x = torch.randn(2, 5, D)
    for name in ("post", "deepnorm"):
        rule = make_residual(name, nn.Identity(), lambda: RMSNorm(D, 0.0), depth=9)
        torch.testing.assert_close(rule(1000 * x), rule(x))
        torch.testing.assert_close(rule(x).square().mean(-1), torch.ones(2, 5))
    for name in ("pre", "reordered", "sandwich"):
        rule = make_residual(name, nn.Identity(), lambda: RMSNorm(D, 0.0), depth=9)
        assert rule(1000 * x).square().mean() > 1e5


@pytest.mark.parametrize("name", RESIDUALS)
def test_every_rule_of_the_table_trains(name):
    norm = (lambda: L2Norm(D)) if name == "ngpt" else lambda: RMSNorm(D)
    losses, moved = trained(model := Small(name, norm))
    assert losses[-1] < losses[0] / 2
    assert moved == {n for n, _ in model.named_parameters()}
    assert model.layers[0].open(x := torch.randn(1, 2, D)) is x
    assert model.layers[0].close(x) is x


def test_resetting_a_block_puts_its_scalar_back():
    block = Block(nn.Identity(), nn.Identity(), lambda: RMSNorm(D), scalar=True)
    block.scalar.fill_(7)
    block.reset_parameters()
    assert block.scalar.item() == 1
    Block(nn.Identity(), nn.Identity(), lambda: RMSNorm(D)).reset_parameters()


@pytest.mark.parametrize("qk_norm_gain", ["shared", "per_head"])
def test_every_expert_lies_on_the_sphere_and_no_bias_or_gain_does(qk_norm_gain):
    config = ModelConfig(
        hidden_size=32, norm="l2", norm_placement="ngpt", final_norm=False,
        num_experts=4, activation="swiglu", mlp_bias=True,
        router_bias=True, num_shared_experts=1,
        num_hidden_layers=2, qk_norm="rmsnorm", qk_norm_gain=qk_norm_gain,
        num_attention_heads=1)  # The gain of a head is as wide as the stream
    model, turned = Decoder(config), set()
    with torch.no_grad():
        for p in model.parameters(): p.normal_()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    normalise_weights_(model)
    for n, p in model.named_parameters():
        if torch.equal(p, before[n]): continue
        turned.add(n.removesuffix(".weight").rsplit(".", 1)[-1])
        axis = -2 if "o_proj" in n or "down_proj" in n else -1
        length = before[n].norm(dim=axis, keepdim=True)
        torch.testing.assert_close(p, before[n] / length)
    assert turned == {"embedding", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj",
                      "router", "gate_up_proj", "gate_proj", "up_proj", "down_proj"}
    same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert {n.rsplit(".", 1)[-1] for n in same} == {
        "weight", "bias", "gate_up_bias", "down_bias"}
    assert all("norm" in n or "alpha" in n for n in same if n.endswith("weight"))


# --- the same through the flat config of a decoder

@pytest.mark.parametrize("name", [*RESIDUALS, *ALIASES, "parallel"])
def test_every_placement_is_a_value_of_the_config(name):
    norm = dict(norm="l2") if name == "ngpt" else {}
    config = ModelConfig(vocab_size=11, hidden_size=D, num_attention_heads=2,
                         num_hidden_layers=3, norm_placement=name, **norm)
    assert config.norm_placement == placement(name)
    losses, moved = trained(model := Decoder(config))
    assert losses[-1] < losses[0] / 2
    assert moved == {n for n, _ in model.named_parameters()}
    if name == "parallel": return
    for part in ("attention", "mlp"):
        one = ModelConfig(num_hidden_layers=1, **norm,
                          **{f"{part}_norm_placement": name})
        rule = getattr(Decoder(one).layers[0], part)
        assert type(rule) is type(getattr(model.layers[0], part))


def test_deepnorm_of_a_config_knows_its_depth():
    model = Decoder(ModelConfig(num_hidden_layers=5, norm_placement="deepnorm"))
    for layer in model.layers:
        assert layer.attention.alpha == layer.mlp.alpha == 10 ** 0.25


@pytest.mark.parametrize("rule", [Streams, ByDepth])
def test_a_rule_from_outside_is_a_value_of_the_config(entry, rule):
    sizes = dict(vocab_size=11, hidden_size=D, num_attention_heads=2,
                 num_hidden_layers=2)
    with pytest.raises(ValueError, match="norm_placement='mine' is not one of"):
        ModelConfig(**sizes, norm_placement="mine")
    entry("mine", rule)
    model = Decoder(ModelConfig(**sizes, norm_placement="mine"))
    assert type(model.layers[1].mlp) is rule
    losses, moved = trained(model)
    assert losses[-1] < losses[0] / 2
    assert moved == {n for n, _ in model.named_parameters()}
    # Cached decoding goes the same way as a whole forward
    ids, cache = torch.arange(8).view(1, 8), model.eval().make_cache()
    steps = torch.cat([model(ids[:, i:i + 2], cache=cache) for i in range(0, 8, 2)], 1)
    torch.testing.assert_close(steps, model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [
    dict(norm="layernorm", qk_norm="layernorm", embedding_norm="layernorm",
         embedding_norm_gain=True, layer_scale_init=0.1, mlp_bias=True),
    dict(sigma_reparam=True, attention_bias=True, layer_scalar=True),
    dict(num_experts=4, activation="swiglu", router_bias=True,
         router_correction_bias=True, router_norm=True, router_expert_scale=True,
         mlp_bias=True),
    dict(norm="l2", norm_placement="ngpt", qk_norm="l2", qk_scale=True, mlp_scale=True,
         hidden_size_per_layer_input=4, activation="swiglu")])
def test_every_room_puts_back_or_names_all_that_it_owns(how):
    "Nothing of a run before is left: drawn by name, or reset by its module."
    rooms = {"norms", "mlp", "embedding", "reparam", "residual"}
    model, seen = Decoder(ModelConfig(num_hidden_layers=1, **how)), set()
    for module in model.modules():
        own = dict([*module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False)])
        room = type(module).__module__.removeprefix("stabbook.")
        if room not in rooms or not own: continue
        seen.add(type(module).__name__)
        drawn = {n: own[n].detach().clone() for n in getattr(module, "drawn", ())}
        before = {n: t.detach().clone() for n, t in own.items() if n not in drawn}
        with torch.no_grad():
            for n in before: own[n].fill_(7)
        module.reset_parameters()
        for n, t in before.items():
            torch.testing.assert_close(own[n].detach(), t, rtol=1e-5, atol=1e-5)
        for n, t in drawn.items(): assert torch.equal(own[n], t)
    assert len(seen) >= 2
