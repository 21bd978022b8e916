"""Seams: a part of one's own is an entry or an object, and no file of the package changes."""  # noqa: E501
import pytest
import torch
from torch import nn

from stabbook.attention import OUTPUTS, Attention, LatentAttention
from stabbook.model import Decoder, ModelConfig, lm_loss
from stabbook.norms import NORMS


@pytest.fixture
def entry():
    "Put an entry into a registry, and take it out again"
    put = []

    def add(registry, name, made):
        assert name not in registry
        registry[name] = made
        put.append((registry, name))
    yield add
    for registry, name in put: del registry[name]


# A new output stage: nine lines
class Gate(nn.Module):
    "Gated attention: what the heads answer, times a sigmoid of the input"
    def __init__(self, hidden_size, heads, width):
        super().__init__()
        self.proj = nn.Linear(hidden_size, heads * width, bias=False)

    def forward(self, y, x):  # (B, T, H, width of a value), (B, T, D)
        return y * self.proj(x).view_as(y).sigmoid()


# A new norm: ten lines
class DyT(nn.Module):
    "A norm without statistics: g·tanh(αx)"

    def __init__(
        self, dim, eps, *, gain=True, zero_centered_gain=False, cast_before_gain=True
    ):
        super().__init__()
        shape = (dim,) if isinstance(gain, bool) else gain
        self.alpha, self.weight = (
            nn.Parameter(torch.ones(1)),
            nn.Parameter(torch.ones(shape)),
        )

    def reset_parameters(self): self.alpha.data.fill_(0.5), self.weight.data.fill_(1.0)

    def forward(self, x): return self.weight * torch.tanh(self.alpha * x)


def learns(model, forward, target, steps=30):
    "Whether a few steps of Adam bring a loss down, and every parameter has a gradient"
    optimiser, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (forward() - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters()
    )
    return losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("latent", [False, True])
def test_an_output_stage_is_an_entry(entry, latent):
    entry(OUTPUTS, "gate", Gate)
    torch.manual_seed(0)
    sizes = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6)
    kind, how = (LatentAttention, sizes) if latent else (Attention, {})
    gated = kind(32, 4, attention_output="gate", **how)
    x, target = torch.randn(2, 7, 32), torch.randn(2, 7, 32) / 8
    plain = kind(32, 4, **how)
    plain.load_state_dict(gated.state_dict(), strict=False)
    with torch.no_grad(): gated.output.proj.weight.zero_()
    torch.testing.assert_close(2 * gated(x), plain(x))  # Half open everywhere
    assert learns(gated, lambda: gated(x), target)


def test_an_unknown_output_stage_is_refused():
    with pytest.raises(ValueError, match="attention_output='gate' is not one of None"):
        Attention(32, 4, attention_output="gate")


def test_an_output_stage_is_an_object_in_a_decoder():
    model = Decoder(ModelConfig(num_hidden_layers=2, hidden_size=32))
    for a in model.attentions: a.output = Gate(32, a.num_attention_heads, a.head_dim)
    model.reset_parameters(3)
    ids = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    optimiser, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(20):
        optimiser.zero_grad()
        loss, _ = lm_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    gates = [a.output.proj.weight for a in model.attentions]
    assert losses[-1] < losses[0] - 1 and all(g.grad.abs().max() > 0 for g in gates)
    assert "layers.0.attention.branch.output.proj.weight" in dict(
        model.named_parameters()
    )


def test_a_norm_is_an_entry(entry):
    with pytest.raises(ValueError, match="qk_norm='dyt' is not one of"):
        Attention(32, 4, qk_norm="dyt")
    entry(NORMS, "dyt", DyT)
    torch.manual_seed(0)
    attn = Attention(32, 4, qk_norm="dyt", v_norm="dyt", qk_norm_gain="per_head")
    x, target = torch.randn(2, 7, 32), torch.randn(2, 7, 32) / 8
    assert attn.q_norm.norm.weight.shape == (4, 8)
    assert learns(attn, lambda: attn(x), target)
