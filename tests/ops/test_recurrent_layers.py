"""torch.nn's own layers on the virtual GPU take the kernels of CUDA."""

import pytest
import torch
from torch import nn

from memest.estimator.hardware.gpus import find_gpu
from memest.estimator.virtual_gpu import VirtualGpu


@pytest.fixture
def virtual():
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        yield gpu


def test_the_weights_of_a_layer_lie_in_one_buffer_on_the_gpu(virtual):
    layer = nn.LSTM(64, 128, 2).cuda()
    assert len({p.untyped_storage()._cdata for p in layer.parameters()}) == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_go_forward_and_back_as_one_operator(virtual, kind, dtype):
    layer = kind(64, 128, 2, batch_first=True, bidirectional=True).cuda().to(dtype)
    before = virtual.mode.kernels.coverage.num_ops
    output, _ = layer(torch.randn(4, 10, 64, device="cuda", dtype=dtype))
    output.sum().backward()
    assert output.shape == (4, 10, 256)
    assert virtual.mode.kernels.coverage.num_ops - before < 150
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())


def test_packed_sequences_run_on_the_rows_that_count(virtual):
    lengths = torch.tensor([10, 7, 7, 2])
    x = torch.randn(4, 10, 64, device="cuda", requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    assert packed.data.shape == (26, 64)
    output, _ = nn.GRU(64, 32).cuda()(packed)
    nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0].sum().backward()
    assert x.grad.shape == x.shape


def test_a_padded_encoder_works_on_the_rows_that_count_in_evaluation(virtual):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).cuda().eval()
    padding = torch.zeros(4, 16, dtype=torch.bool)
    padding[:, 12:] = True
    with torch.no_grad():
        out = encoder(torch.randn(4, 16, 64, device="cuda"), src_key_padding_mask=padding.cuda())
    assert out.shape == (4, 16, 64)
    assert type(out) is torch.Tensor


def test_distributions_take_parameters_that_nobody_knows(virtual):
    logits = torch.randn(8, 10, device="cuda", requires_grad=True)
    policy = torch.distributions.Categorical(logits=logits)
    policy.log_prob(policy.sample()).sum().backward()
    assert logits.grad is not None


def test_what_is_made_in_the_likeness_of_a_tensor_lies_where_it_does(virtual):
    rows = [torch.ones(n, 64, device="cuda") for n in (10, 7)]
    before = torch.cuda.memory_allocated()
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert (padded.device.type, padded.shape) == ("cuda", (2, 10, 64))
    assert torch.cuda.memory_allocated() - before == 5120
    assert nn.utils.rnn.pack_sequence(rows).data.device.type == "cuda"
    assert torch.vander(rows[0][:, 0]).device.type == "cuda"
    assert torch.combinations(torch.arange(4, device="cuda")).shape == (6, 2)
    assert nn.utils.rnn.pad_sequence([torch.ones(3), torch.ones(2)]).device.type == "cpu"


def test_what_has_no_elements_lies_on_the_gpu_and_takes_nothing(virtual):
    zeros = torch.zeros(5, device="cuda")
    before = torch.cuda.memory_allocated()
    empty = [
        zeros.nonzero(),
        torch.roll(zeros[:0].view(0, 3), 1, 0),
        nn.functional.unfold(zeros[:0].view(0, 1, 5, 5), 2),
    ]
    assert [(t.device.type, t.numel()) for t in empty] == [("cuda", 0)] * 3
    assert torch.cuda.memory_allocated() == before
    assert torch.cat([empty[0], zeros.long().view(5, 1)]).shape == (5, 1)
