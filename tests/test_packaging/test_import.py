"""What ``import mmstepnet`` does: versions, configs, and checkpoints for the safe loader."""

import importlib.metadata
import io
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.hub import get_config
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.optim import OneCycleParamScheduler
from mmengine.registry import PARAM_SCHEDULERS

from mmstepnet.utils import compat
from mmstepnet.utils.safe_globals import OneCycle, allow_mmengine_checkpoints, method

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.smoke


def test_import_is_light():
    heavy = {
        'mmcv',
        'mmdet',
        'mmpretrain',
        'cv2',
        'matplotlib',
        'scipy',
        'sklearn',
        'pkg_resources',
    }
    code = 'import sys, mmstepnet; print(*{name.split(".")[0] for name in sys.modules})'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


class TestVersions:
    @pytest.mark.parametrize(
        ('version', 'expected'),
        [
            ('2.11.0+cu130', (2, 11, 0)),
            ('2.6', (2, 6, 0)),
            ('2.0.0rc4', (2, 0, 0)),
            ('0.10.12', (0, 10, 12)),
            ('2.7.0a0+git123', (2, 7, 0)),
        ],
    )
    def test_release(self, version, expected):
        assert compat.release(version) == expected

    def test_release_of_no_version(self):
        with pytest.raises(ValueError, match="begin with a number, got 'unknown'"):
            compat.release('unknown')

    def test_versions_without_import_are_the_modules_own(self):
        import mmdet
        import mmpretrain

        for module in (mmdet, mmpretrain, torch):
            code = (
                'import runpy, sys; '
                f'compat = runpy.run_path({compat.__file__!r}); '
                f'print(compat["installed_version"]({module.__name__!r})); '
                f'assert {module.__name__!r} not in sys.modules'
            )
            done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
            assert (done.stdout.strip(), done.stderr) == (module.__version__, '')

    def test_a_forks_version_comes_from_its_own_version_file(self, tmp_path, monkeypatch):
        package = tmp_path / 'forked'
        package.mkdir()
        (package / '__init__.py').write_text('raise RuntimeError("imported")\n')
        (package / 'version.py').write_text(
            'from importlib.metadata import version\n__version__ = version("numpy")\n'
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert compat.installed_version('forked') == np.__version__

    def test_missing_module_is_passed_over(self):
        assert compat.installed_version('no_such_module') is None
        compat.check_versions({'no_such_module': ('1.0', '2.0', 'no_such_module')})

    def test_too_old(self):
        with pytest.raises(ImportError, match=r'needs torch >= 99.*pip install torch==99\.1'):
            compat.check_versions({'torch': ('99', '100', 'torch==99.1')})

    def test_newer_than_tried_warns_only(self):
        with pytest.warns(UserWarning, match='not been tried with torch'):
            compat.check_versions({'torch': ('1.0', '2.0', 'torch==1.9')})

    def test_pip_arguments_are_those_of_the_requirement_files(self):
        def lines(name):
            text = (ROOT / 'requirements' / name).read_text()
            return {line for line in text.splitlines() if not line.startswith('#')}

        upstream = {k: arguments for k, (*_, arguments) in compat.SUPPORTED.items() if k != 'torch'}
        for table, name in ((upstream, 'mminstall.txt'), (compat.FORKS, 'mminstall_onedl.txt')):
            assert {arguments.split()[-1] for arguments in table.values()} == lines(name)
        assert upstream.keys() == compat.FORKS.keys()

    def test_a_fork_is_mended_by_the_fork(self, monkeypatch):
        def version(name):
            if name != 'onedl-mmcv':
                raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, 'version', version)
        monkeypatch.setattr(compat, 'installed_version', lambda module: '1.0')
        table = {'mmcv': ('2.0', '3', 'mmcv==2.1'), 'mmdet': ('2.0', '3', 'mmdet==3.3')}
        with pytest.raises(ImportError, match=r'install --no-build-isolation onedl-mmcv==2\.3\.6$'):
            compat.check_versions(table)
        del table['mmcv']
        with pytest.raises(ImportError, match=r'install mmdet==3\.3$'):
            compat.check_versions(table)

    def test_what_is_installed_here_is_supported(self):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            compat.check_versions()


class TestConfigs:
    """``mmstepnet::`` in every place where MMEngine takes it."""

    NAME = 'mmstepnet::digits/faster_rcnn_r18_stepnet_digits.py'

    def test_is_known(self):
        assert 'mmstepnet' in MODULE2PACKAGE

    def test_as_base(self, tmp_path):
        path = tmp_path / 'mine.py'
        path.write_text(f"_base_ = '{self.NAME}'\nmodel = dict(backbone=dict(depth=34))\n")
        backbone = Config.fromfile(path).model.backbone
        assert backbone.depth == 34
        assert backbone.plugins[0].cfg.type == 'mmstepnet.StepNetAdaptor'

    @pytest.mark.parametrize(
        'name',
        [
            'attention/vit_metric_12e_digits.py',
            'bccd/faster_rcnn_r18_stepnet_bccd.py',
            'cifar10_mini/resnet20_stepnet_20e_cifar10-mini.py',
            'classification/resnet50_stepnet_120e_imagenet.py',
            'detection/faster_rcnn_r50_stepnet_1x_coco.py',
            'digits/faster_rcnn_r18_stepnet_digits.py',
            'digits/resnet20_stepnet_12e_digits.py',
        ],
    )
    def test_as_base_it_is_what_it_is_by_path(self, tmp_path, name):
        """Types are looked up in the scope that the config itself sets, not in ``mmstepnet``."""
        path = tmp_path / 'mine.py'
        path.write_text(f"_base_ = 'mmstepnet::{name}'\n")
        by_path = Config.fromfile(ROOT / 'configs' / name)
        assert Config.fromfile(path).to_dict() == by_path.to_dict()

    def test_get_config(self):
        assert get_config(self.NAME).model.backbone.type == 'mmstepnet.StepResNet'

    def test_top_level_config_through_a_folder(self):
        config = get_config('mmstepnet::detection/../faster_rcnn_r50_stepnet_coco.py')
        assert config.model.backbone.depth == 50


class TestSafeLoader:
    @staticmethod
    def through_file(content):
        file = io.BytesIO()
        torch.save(content, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def test_message_hub(self):
        hub = MessageHub('safe-loader-test')
        for value in (1.0, 2.0, 6.0):
            hub.update_scalar('train/loss', torch.tensor(value))
        hub.update_info('iter', np.int64(3))
        loaded = self.through_file(hub.state_dict())
        buffer = loaded['log_scalars']['train/loss']
        assert isinstance(buffer, HistoryBuffer)
        assert buffer.mean() == 3.0
        assert buffer.statistics('max') == 6.0
        assert loaded['runtime_info']['iter'] == 3

    @pytest.mark.parametrize('dtype', ['?', 'i1', 'u8', 'f2', 'f4', 'f8', 'c16', 'U3', 'S3'])
    def test_numpy_arrays_and_scalars(self, dtype):
        array = np.array([0, 1, 1]).astype(dtype)
        loaded, scalar = self.through_file([array, array[1]])
        np.testing.assert_array_equal(loaded, array)
        assert loaded.dtype == array.dtype
        assert scalar == array[1]

    @pytest.mark.parametrize('module', [b'numpy.core.multiarray', b'numpy._core.multiarray'])
    def test_files_of_either_numpy(self, module):
        file = io.BytesIO()
        # The non-zip format is plain pickles, in which a module's name can be replaced.
        torch.save([np.arange(3)], file, _use_new_zipfile_serialization=False)
        here = np.arange(3).__reduce__()[0].__module__.encode()
        content = file.getvalue().replace(b'c' + here + b'\n', b'c' + module + b'\n')
        (loaded,) = torch.load(io.BytesIO(content), weights_only=True)
        np.testing.assert_array_equal(loaded, np.arange(3))

    def test_a_block_of_someone_elses_takes_nothing_away(self):
        entries = [HistoryBuffer, np.ndarray, np.dtype, type(np.dtype('f8')), getattr]
        with torch.serialization.safe_globals(entries):
            pass
        loaded = self.through_file([HistoryBuffer([3.0], [1]), np.ones(2)])
        assert loaded[0].mean() == 3.0
        np.testing.assert_array_equal(loaded[1], np.ones(2))

    def test_stays_on(self):
        class Anything:
            def __reduce__(self):
                return print, ('code of the file',)

        file = io.BytesIO()
        torch.save(Anything(), file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match='print'):
            torch.load(file)

    @pytest.mark.parametrize(
        ('owner', 'name'),
        [
            (HistoryBuffer, '__init__'),
            (HistoryBuffer, '__class__'),
            (np.ndarray, 'tofile'),
            (OneCycleParamScheduler, 'load_state_dict'),
        ],
    )
    def test_getattr_reaches_statistics_alone(self, owner, name):
        class Walk:
            def __reduce__(self):
                return getattr, (owner, name)

        file = io.BytesIO()
        torch.save(Walk(), file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match='only the statistics'):
            torch.load(file)
        assert method(HistoryBuffer, 'mean') is HistoryBuffer.mean

    @pytest.mark.parametrize('name', sorted(PARAM_SCHEDULERS.module_dict))
    def test_every_schedule_is_read(self, name):
        arguments = {
            'OneCycle': dict(eta_max=0.1, total_steps=9),
            'Step': dict(step_size=2),
            'MultiStep': dict(milestones=[2]),
            'Exponential': dict(gamma=0.9),
            'CosineAnnealing': dict(T_max=5),
            'CosineRestart': dict(periods=[2, 3], restart_weights=[1, 0.5], eta_min=0.0),
            'ReduceOnPlateau': dict(monitor='loss'),
        }.get(re.sub('(LR|Momentum|ParamScheduler)$', '', name), {})
        if name.endswith('ParamScheduler'):
            arguments = dict(arguments, param_name='lr')
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        state = PARAM_SCHEDULERS.get(name)(optimizer, **arguments).state_dict()
        assert self.through_file(state) == state

    @pytest.mark.parametrize('name', ['_annealing_cos', '_annealing_linear'])
    def test_annealing_functions_are_mmengines_own(self, name):
        """By either ``getattr``, so that what was read is written under MMEngine's name again."""
        expected = getattr(OneCycleParamScheduler, name)
        assert getattr(OneCycle, name) is method(OneCycle, name) is expected
        assert not hasattr(OneCycle, 'load_state_dict')

    def test_twice_changes_nothing(self):
        before = len(torch.serialization.get_safe_globals())
        allow_mmengine_checkpoints()
        assert len(torch.serialization.get_safe_globals()) == before
