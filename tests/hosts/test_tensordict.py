"""A tensorclass still has its tensors in one TensorDict."""

import torch
from tensordict import TensorClass, TensorDict

from torchrl_mt._hosts.tensordict import tensor_fields, with_tensor_fields

# --- Records of experience ------------------------------------------------------------------------


class Record(TensorClass, shadow=True):
    values: torch.Tensor
    name: str


def test_the_tensors_of_a_record_are_read_and_replaced():
    record = Record(values=torch.ones(2), name="here", batch_size=[2])
    fields = tensor_fields(record)
    assert isinstance(fields, TensorDict)
    assert torch.equal(fields["values"], torch.ones(2))
    other = with_tensor_fields(record, fields.apply(lambda x: x + 1))
    assert isinstance(other, Record)
    assert torch.equal(other.values, torch.full((2,), 2.0))
    assert other.name == "here"
