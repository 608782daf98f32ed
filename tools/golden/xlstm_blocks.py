"""sLSTM blocks for the tiny xLSTM of architectures.py: transformers has none, the package `xlstm` does.

The block is transformers' own with another layer in it: norm, layer, residual, norm, feed-forward, residual. The layer is
the package's `sLSTMLayer` with its plain (vanilla) cell. It has no cache; passes go over the whole sequence.
"""

from __future__ import annotations

import torch
import transformers.utils

# transformers takes its xLSTM from the package where that is installed; its own is the reference here.
transformers.utils.is_xlstm_available = lambda: False

from transformers.models.xlstm import modeling_xlstm  # noqa: E402


class SlstmBlock(torch.nn.Module):
    """One block with an sLSTM layer in place of the mLSTM layer."""

    def __init__(self, config):
        super().__init__()
        from xlstm.blocks.slstm.layer import sLSTMLayer, sLSTMLayerConfig

        norm = modeling_xlstm.xLSTMRMSNorm
        self.norm_slstm = norm(config.hidden_size, eps=config.norm_eps)
        self.slstm_layer = sLSTMLayer(
            sLSTMLayerConfig(
                embedding_dim=config.hidden_size,
                num_heads=config.num_heads,
                conv1d_kernel_size=4,
                backend="vanilla",
                dtype="float32",
                enable_automatic_mixed_precision=False,
            )
        )
        self.norm_ffn = norm(config.hidden_size, eps=config.norm_eps)
        self.ffn = modeling_xlstm.xLSTMFeedForward(config)

    def forward(self, x, state=None):
        x = x + self.slstm_layer(self.norm_slstm(x))
        return x + self.ffn(self.norm_ffn(x)), state


def replace_blocks(model: torch.nn.Module, places: tuple[int, ...]) -> None:
    """Puts sLSTM blocks at some places of an `xLSTMForCausalLM`."""
    for place in places:
        model.backbone.blocks[place] = SlstmBlock(model.config)
