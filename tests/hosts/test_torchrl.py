"""TorchRL's losses still say where they look for masks."""

from torch import nn

from torchrl_mt._hosts.torchrl import loss_mask_keys
from torchrl_mt.objectives import MultiTurnLoss

# --- Losses ---------------------------------------------------------------------------------------


def test_a_loss_names_the_masks_that_it_reads():
    loss = MultiTurnLoss(nn.Embedding(2, 2))
    assert ("collector", "mask") in loss_mask_keys(loss)
    loss.loss_mask_key = "mine"
    assert loss_mask_keys(loss) == ("mine",)
