import pytest
import torch
from mmengine.config import Config

from mmstepnet.models import switch_to_deploy
from mmstepnet.utils.command_line import build_model
from tests.tools import load_tool

pytest.importorskip('mmpretrain')

CONFIG = """
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
default_scope = 'mmpretrain'
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.StepResNet', depth=18, base_channels=8,
        plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))],
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
)
"""


@pytest.fixture
def files(tmp_path):
    config, checkpoint = tmp_path / 'model.py', tmp_path / 'model.pth'
    config.write_text(CONFIG)
    model = build_model(Config.fromfile(config))
    # Statistics and adaptors away from their start.
    for name, tensor in model.state_dict().items():
        if 'running_var' in name:
            tensor.uniform_(0.5, 2)
        elif 'running_mean' in name or '.step_size.' in name:
            tensor.copy_(torch.randn(tensor.shape))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=3)), checkpoint)
    return config, checkpoint, model.eval()


@pytest.fixture
def convert(monkeypatch):
    """The tool in this process, called with command line arguments."""
    tool = load_tool('model_converters/to_deploy')

    def run(*arguments):
        given = ['to_deploy.py', *map(str, arguments)]
        given += [] if '--size' in given else ['--size', '64', '64']
        monkeypatch.setattr('sys.argv', given)
        tool.main()

    return run


def test_checkpoint_loads_into_a_switched_model(files, convert, tmp_path):
    config, checkpoint, model = files
    out = tmp_path / 'out' / 'deployed.pth'
    convert(config, checkpoint, out)
    content = torch.load(out, weights_only=True)
    assert content['meta'] == dict(epoch=3, deployed=True)
    deployed = switch_to_deploy(build_model(Config.fromfile(config)).eval())
    deployed.load_state_dict(content['state_dict'])
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want, got = model(x), deployed(x)
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.slow
def test_onnx_file_takes_any_batch_and_size(files, convert, tmp_path):
    runtime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    config, checkpoint, model = files
    convert(config, checkpoint, tmp_path / 'model.onnx')
    session = runtime.InferenceSession(
        str(tmp_path / 'model.onnx'), providers=['CPUExecutionProvider']
    )
    for shape in ((1, 3, 64, 96), (3, 3, 128, 64)):
        x = torch.randn(shape)
        got = torch.from_numpy(session.run(None, dict(input=x.numpy()))[0])
        with torch.no_grad():
            torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)


def test_bad_input_is_one_line(files, convert, tmp_path, capsys):
    config, checkpoint, _ = files
    with pytest.raises(SystemExit, match='2'):
        convert(config, checkpoint, tmp_path / 'x.bin')
    assert 'must end in .pth or .onnx' in capsys.readouterr().err
    with pytest.raises(SystemExit, match='2'):
        convert(config, tmp_path / 'missing.pth', tmp_path / 'x.pth')
    assert capsys.readouterr().err.startswith('error: checkpoint')
    assert not (tmp_path / 'x.pth').exists()


@pytest.mark.parametrize(
    'out, size, message',
    [
        ('x.pth', (0, 64), '--size must be two positive numbers, got 0 64'),
        ('x.onnx', (64, 100), '--size must be multiples of 32 for .onnx, got 64 100'),
        ('taken.pth', (64, 64), 'taken.pth is there already'),
        ('taken.pth/x.pth', (64, 64), 'can not be made'),
    ],
)
def test_what_can_not_be_written(files, convert, tmp_path, capsys, out, size, message):
    config, checkpoint, _ = files
    taken = tmp_path / 'taken.pth'
    taken.write_bytes(b'precious')
    before = {*tmp_path.iterdir()}
    with pytest.raises(SystemExit, match='2'):
        convert(config, checkpoint, tmp_path / out, '--size', *size)
    assert message in capsys.readouterr().err
    assert taken.read_bytes() == b'precious'
    assert {*tmp_path.iterdir()} == before
