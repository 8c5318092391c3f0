"""The installer: what it keeps, what it rebuilds, and what it says when it cannot go on."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import namedtuple

import psutil
import pytest

from tests.tools import ROOT, load_tool


@pytest.fixture
def install(tmp_path, monkeypatch):
    module = load_tool('install')
    monkeypatch.setattr(module, 'LOGS', tmp_path / 'logs')
    monkeypatch.setattr(module, 'TORCH_CHOICE', tmp_path / 'choice.txt')
    for name in ('MMSTEPNET_STACK', 'MMSTEPNET_TORCH', 'CXX', 'MAX_JOBS', 'FORCE_CUDA'):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def holds(install, monkeypatch):
    """Sets what the environment holds: distribution name to version."""

    def set_versions(**versions):
        versions = {name.replace('_', '-'): version for name, version in versions.items()}
        monkeypatch.setattr(install, 'distribution_version', versions.get)

    set_versions()
    return set_versions


@pytest.fixture
def pip_calls(install, monkeypatch):
    calls = []
    monkeypatch.setattr(
        install,
        'pip_install',
        lambda progress, *arguments, env=None: calls.append((arguments, env)),
    )
    return calls


def progress_of(install, *plan):
    return install.Progress(list(plan) or [('torch', 3)], stream=io.StringIO())


class TestWhatIsKept:
    @pytest.mark.parametrize(
        ('requirement', 'version', 'expected'),
        [
            ('mmdet==3.3.0', '3.3.0', True),
            ('mmdet==3.3.0', '3.2.0', False),
            ('numpy>=1.26,<3', '2.4.6', True),
            ('numpy>=1.26,<3', '1.25.9', False),
            ('numpy>=1.26,<3', '3.0.0', False),
            ('ninja', '1.13', True),
            ('torch==2.11.0', '2.11.0+cu130', True),
        ],
    )
    def test_requirement(self, install, holds, requirement, version, expected):
        holds(mmdet=version, numpy=version, ninja=version, torch=version)
        assert install.is_satisfied(requirement) is expected
        holds()
        assert not install.is_satisfied(requirement)

    def test_every_line_of_our_files_is_understood(self, install, holds):
        for path in (ROOT / 'requirements').glob('*.txt'):
            for line in install.requirement_lines(path.name):
                assert install.is_satisfied(line) is False

    @pytest.mark.parametrize('version', ['2.6.0', '2.11.0+cpu', '2.13.1'])
    def test_working_torch_in_range_stays(self, install, holds, monkeypatch, version):
        holds(torch=version)
        monkeypatch.setattr(install, 'works', lambda code: '')
        assert install.torch_problem('') == ''
        monkeypatch.setattr(install, 'works', lambda code: 'undefined symbol')
        assert install.torch_problem('') == 'undefined symbol'

    @pytest.mark.parametrize('version', ['2.5.1', '2.14.0'])
    def test_torch_out_of_range_is_replaced(self, install, holds, version):
        holds(torch=version)
        assert install.torch_problem('') == (
            f'{version} is outside the supported range, 2.6 up to (not including) 2.14'
        )

    def test_chosen_torch_is_installed_once(self, install, holds, monkeypatch, pip_calls):
        holds(torch='2.11.0')
        monkeypatch.setattr(install, 'works', lambda code: '')
        removed = []
        progress = progress_of(install)
        monkeypatch.setattr(progress, 'run', removed.append)
        choice = 'torch==2.11.0 --index-url somewhere'
        assert choice in install.torch_problem(choice)
        install.install_torch(progress, choice)
        assert pip_calls == [(('torch==2.11.0', '--index-url', 'somewhere'), None)]
        assert removed[0][-3:] == ['--yes', 'torch', 'torchvision']
        assert install.torch_problem(choice) == ''

    def test_complete_environment_has_no_steps(self, install, holds, monkeypatch):
        lines = [
            *install.requirement_lines('runtime.txt'),
            *install.requirement_lines('mminstall.txt'),
        ]
        versions = {'setuptools': '80.9.0', 'wheel': '0.4', 'ninja': '1.1', 'torch': '2.11.0'}
        for line in lines:
            name, _, version = line.replace('>=', '==').split(',')[0].partition('==')
            versions.setdefault(name, version)
        holds(**versions)
        monkeypatch.setattr(install, 'works', lambda code: '')
        monkeypatch.setattr(install, 'cuda_state', lambda: (False, ''))
        monkeypatch.setattr(install, 'package_is_linked', lambda: True)
        wanted = install.Wanted('upstream', with_tests=False)
        assert wanted.is_there()
        assert wanted.steps() == []
        del versions['mmdet']
        holds(**versions)
        wanted = install.Wanted('upstream', with_tests=False)
        assert not wanted.is_there()
        assert [title for title, *_ in wanted.steps()] == ['libraries']

    def test_new_torch_means_new_mmcv(self, install, holds, monkeypatch):
        monkeypatch.setattr(install, 'package_is_linked', lambda: False)
        titles = [title for title, *_ in install.Wanted('onedl', with_tests=True).steps()]
        assert titles == [
            'build tools',
            'torch (not installed)',
            'libraries',
            'mmcv with its ops',
            'mmstepnet',
        ]

    def test_this_checkout_is_recognised(self, install, tmp_path, monkeypatch):
        class Distribution:
            version = install.runpy.run_path(str(ROOT / 'mmstepnet/version.py'))['__version__']
            origin = {'url': ROOT.as_uri(), 'dir_info': {'editable': True}}

            def read_text(self, name):
                return json.dumps(self.origin)

        there = Distribution()
        monkeypatch.setattr(install.importlib.metadata, 'distribution', lambda name: there)
        monkeypatch.setattr(install.Path, 'is_dir', lambda path: True)
        assert install.package_is_linked()
        there.origin = {'url': tmp_path.as_uri(), 'dir_info': {'editable': True}}
        assert not install.package_is_linked()


class TestStack:
    def test_default_and_choice(self, install, holds, monkeypatch):
        assert install.choose_stack() == 'upstream'
        monkeypatch.setenv('MMSTEPNET_STACK', 'onedl')
        assert install.choose_stack() == 'onedl'

    def test_held_stack_is_kept(self, install, holds):
        holds(onedl_mmengine='0.10.12')
        assert install.choose_stack() == 'onedl'

    def test_other_stack_is_refused(self, install, holds, monkeypatch):
        holds(mmengine='0.10.7')
        monkeypatch.setenv('MMSTEPNET_STACK', 'onedl')
        with pytest.raises(
            install.InstallError, match=r'holds the upstream stack.*another environment'
        ):
            install.choose_stack()

    def test_unknown_stack(self, install, holds, monkeypatch):
        monkeypatch.setenv('MMSTEPNET_STACK', 'mmlab')
        with pytest.raises(install.InstallError, match=r"one of upstream, onedl, got 'mmlab'"):
            install.choose_stack()


class TestMachine:
    def test_compiler_here_is_good(self, install):
        install.check_compiler()

    def test_no_compiler(self, install, monkeypatch):
        monkeypatch.setenv('PATH', '')
        with pytest.raises(
            install.InstallError, match=r"No C\+\+ compiler: 'c\+\+'.*build-essential"
        ):
            install.check_compiler()

    def test_old_compiler(self, install, monkeypatch, tmp_path):
        compiler = script(
            tmp_path / 'c++', 'echo "error: unrecognized option -std=c++17" >&2; exit 1'
        )
        monkeypatch.setenv('CXX', str(compiler))
        with pytest.raises(
            install.InstallError, match=r'cannot compile C\+\+17: error: unrecognized'
        ):
            install.check_compiler()

    def test_no_headers(self, install, monkeypatch, tmp_path):
        monkeypatch.setattr(sysconfig, 'get_paths', lambda: {'include': str(tmp_path)})
        with pytest.raises(install.InstallError, match=r'Python\.h is missing.*-dev \(Debian'):
            install.check_compiler()

    def test_full_disk(self, install, monkeypatch):
        usage = namedtuple('usage', 'total used free')
        monkeypatch.setattr(shutil, 'disk_usage', lambda folder: usage(0, 0, 2 * 1024**3))
        install.check_disk(1.0)
        with pytest.raises(install.InstallError, match=r'2\.0 GiB free, the installation needs'):
            install.check_disk(8.0)

    def test_no_registry(self, install, monkeypatch, tmp_path):
        monkeypatch.setenv('PIP_NO_INDEX', '1')
        monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path))
        with pytest.raises(install.InstallError, match='registry cannot be reached'):
            install.check_registry()

    def test_environment_without_pip(self, install, monkeypatch):
        install.check_pip()
        monkeypatch.setattr(install, 'works', lambda code: "No module named 'pip'")
        with pytest.raises(install.InstallError, match=r'has no pip\. Run: .* -m ensurepip'):
            install.check_machine(['mmstepnet'])

    def test_wrong_python(self, install, monkeypatch):
        version = namedtuple('version', 'major minor micro')(3, 13, 0)
        monkeypatch.setattr(sys, 'version_info', version)
        with pytest.raises(install.InstallError, match=r'Python 3\.10, 3\.11 or 3\.12.*is 3\.13'):
            install.check_python()

    @pytest.mark.parametrize(
        ('state', 'nvcc', 'expected'),
        [
            ([True, '13.0', '{home}'], '13.0', ''),
            ([True, '13.0', '{home}'], '12.8', 'does not match torch, which needs CUDA 13.0'),
            ([True, '13.0', None], '', 'nvcc is not installed'),
            ([True, None, '{home}'], '13.0', 'without CUDA'),
        ],
    )
    def test_cuda_compiler(self, install, monkeypatch, tmp_path, state, nvcc, expected):
        (tmp_path / 'bin').mkdir()
        script(tmp_path / 'bin' / 'nvcc', f'echo "Cuda compilation tools, release {nvcc}, V1"')
        answer = json.dumps(state).replace('{home}', str(tmp_path))
        monkeypatch.setattr(install, 'run_python', lambda code: answer)
        gpu, problem = install.cuda_state()
        assert gpu
        assert expected in problem and bool(expected) == bool(problem)


class TestMmcv:
    def test_cached_wheel_of_another_torch_is_rebuilt(self, install, holds, monkeypatch, pip_calls):
        problems = iter(['undefined symbol: _ZN3c10', ''])
        monkeypatch.setattr(install, 'mmcv_problem', lambda requirement, cuda: next(problems))
        monkeypatch.setattr(install, 'cuda_state', lambda: (False, ''))
        progress = progress_of(install)
        install.install_mmcv(progress, 'mmcv==2.1.0')
        assert '_ZN3c10' in progress.stream.getvalue()
        (first, environment), (second, _) = pip_calls
        assert '--no-build-isolation' in first and '--no-binary' not in first
        assert environment['CUDA_VISIBLE_DEVICES'] == ''
        assert second[second.index('--no-binary') + 1] == 'mmcv'
        assert {'--no-cache-dir', '--force-reinstall', '--no-deps'} <= set(second)

    def test_gpu_with_its_compiler_gets_cuda_ops(self, install, holds, monkeypatch, pip_calls):
        asked = []
        monkeypatch.setattr(install, 'cuda_state', lambda: (True, ''))
        monkeypatch.setattr(install, 'works', lambda code: asked.append(code) or '')
        holds(mmcv='2.1.0')
        monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
        install.install_mmcv(progress_of(install), 'mmcv==2.1.0')
        assert 'CUDA_VISIBLE_DEVICES' not in pip_calls[0][1]
        assert 'device="cuda"' in asked[0]

    def test_ops_that_never_work(self, install, holds, monkeypatch, pip_calls):
        monkeypatch.setattr(install, 'mmcv_problem', lambda requirement, cuda: 'no ops')
        monkeypatch.setattr(install, 'cuda_state', lambda: (False, ''))
        with pytest.raises(install.InstallError, match='its ops do not work: no ops'):
            install.install_mmcv(progress_of(install), 'mmcv==2.1.0')

    def test_opencv_without_libgl(self, install, holds, monkeypatch, pip_calls):
        holds(opencv_python='5.0.0.93')
        monkeypatch.setattr(install, 'works', lambda code: 'libGL.so.1: cannot open shared object')
        progress = progress_of(install)
        commands = []
        monkeypatch.setattr(progress, 'run', commands.append)
        install.use_headless_opencv(progress)
        assert commands[0][-3:] == ['uninstall', '--yes', 'opencv-python']
        assert pip_calls[0][0][-1] == 'opencv-python-headless==5.0.0.93'

    def test_opencv_that_is_broken(self, install, holds, monkeypatch):
        holds(opencv_python='5.0.0.93')
        monkeypatch.setattr(install, 'works', lambda code: 'SyntaxError')
        with pytest.raises(install.InstallError, match='OpenCV cannot be imported: SyntaxError'):
            install.use_headless_opencv(progress_of(install))


class TestProgress:
    def test_forecast_from_the_compiled_files(self, install):
        progress = progress_of(install, ('mmcv', 10), ('mmstepnet', 1))
        # 40 of 100 files in 4 minutes: 6 more for the rest, and 1 for the next step.
        assert progress.line(240, (40, 100)) == (
            '  mmcv 04:00 (about 6 min left, about 7 min for everything) 40 of 100 files compiled'
        )
        assert 'about 8 min left, about 9 min' in progress.line(120, (1, 100))
        assert (
            progress.line(630)
            == '  mmcv 10:30 (less than a minute left, about 1 min for everything)'
        )

    def test_log_is_not_flooded(self, install):
        progress = progress_of(install)
        progress.run([sys.executable, '-c', 'print("[1/2] cc\\n" * 500)'])
        assert progress.stream.getvalue() == ''
        assert (install.LOGS / '01.log').read_text().splitlines().count('[1/2] cc') == 500

    @pytest.mark.parametrize(
        ('output', 'reason'),
        [
            ('OSError: [Errno 28] No space left on device', 'The disk is full'),
            ('NewConnectionError: refused', 'registry cannot be reached'),
            ('g++: fatal error: Killed signal terminated program cc1plus', 'MAX_JOBS=1'),
            ('ERROR: No matching distribution found for x==1', 'does not have that version'),
            ('something unheard of', 'something unheard of'),
        ],
    )
    def test_failures_have_a_reason(self, install, output, reason):
        with pytest.raises(install.InstallError, match=reason) as caught:
            progress_of(install).run([sys.executable, '-c', f'print({output!r}); exit(3)'])
        assert f'    {output}\nThe whole output is in ' in str(caught.value)
        assert '01.log' in str(caught.value)

    def test_interruption_ends_what_was_started(self, install, assert_ended, monkeypatch, tmp_path):
        pid_file = tmp_path / 'pid'

        def interrupt(process, state):
            end = time.monotonic() + 60
            while not pid_file.is_file() or not pid_file.read_text().strip():
                assert time.monotonic() < end
                time.sleep(0.01)
            raise KeyboardInterrupt

        progress = progress_of(install)
        monkeypatch.setattr(progress, '_wait', interrupt)
        with pytest.raises(KeyboardInterrupt):
            progress.run(['bash', '-c', f'sleep 60 & echo $! > {pid_file}; wait'])
        with contextlib.suppress(psutil.NoSuchProcess):
            assert_ended([psutil.Process(int(pid_file.read_text()))])


def script(path, text):
    path.write_text(f'#!/bin/bash\n{text}\n')
    path.chmod(0o755)
    return path


class TestShell:
    """The shell scripts around the installer, with stand-ins for Python on the PATH."""

    @pytest.fixture
    def run(self, tmp_path):
        (tmp_path / 'tools').mkdir()
        for name in ('setup_env.sh', 'run_tests.sh'):
            shutil.copy(ROOT / 'tools' / name, tmp_path / 'tools')
        shutil.copytree(ROOT / '.ci', tmp_path / '.ci')
        (tmp_path / 'bin').mkdir()
        for name in ('bash', 'dirname', 'mkdir', 'cp'):
            (tmp_path / 'bin' / name).symlink_to(shutil.which(name))

        def run(*arguments, file='tools/run_tests.sh', **environment):
            return subprocess.run(
                ['bash', str(tmp_path / file), *arguments],
                env={'PATH': str(tmp_path / 'bin'), **environment},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                cwd=os.sep,
            )

        return run

    # Answers to what setup_env.sh asks: is it a fitting version, does pip work, make a venv.
    PYTHON = """
case "$*" in
    -c*) exit {fits} ;;
    '-m pip --version') exit 0 ;;
    '-m venv --clear '*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *) echo "$0: $*" ;;
esac"""

    def test_a_stack_of_no_such_name_makes_no_environment(self, run, tmp_path):
        script(tmp_path / 'bin' / 'python3', self.PYTHON.format(fits=0))
        done = run(MMSTEPNET_STACK='onedel')
        assert done.returncode == 1
        assert 'MMSTEPNET_STACK must be upstream or onedl, got onedel.' in done.stderr
        assert not [*tmp_path.glob('.venv*')]

    def test_no_python_fits(self, run, tmp_path):
        script(tmp_path / 'bin' / 'python3', self.PYTHON.format(fits=1))
        done = run()
        assert done.returncode == 1
        assert 'No Python 3.10, 3.11 or 3.12 found.' in done.stderr
        assert not (tmp_path / '.venv').exists()

    def test_named_python_does_not_fit(self, run, tmp_path):
        script(tmp_path / 'bin' / 'python3', self.PYTHON.format(fits=0))
        old = script(tmp_path / 'old', self.PYTHON.format(fits=1))
        done = run(PYTHON=str(old))
        assert done.returncode == 1
        assert f'found at PYTHON={old}' in done.stderr

    def test_venv_is_made_and_used(self, run, tmp_path):
        script(tmp_path / 'bin' / 'python3.12', self.PYTHON.format(fits=0))
        done = run('-k', 'two words')
        python = tmp_path / '.venv' / 'bin' / 'python'
        assert done.stdout.splitlines()[1:] == [
            f'{python}: tools/install.py --tests',
            f'{python}: -m pytest -m not slow -k two words',
        ]
        assert done.returncode == 0

    def test_half_made_venv_is_made_anew(self, run, tmp_path):
        script(tmp_path / 'bin' / 'python3', self.PYTHON.format(fits=0))
        (tmp_path / '.venv-onedl' / 'bin').mkdir(parents=True)
        script(tmp_path / '.venv-onedl' / 'bin' / 'python', 'exit 1')
        done = run('--all', MMSTEPNET_STACK='onedl')
        assert done.stdout.startswith('Making ')
        assert done.stdout.endswith('.venv-onedl/bin/python: -m pytest\n')

    def test_python_without_venv(self, run, tmp_path):
        script(tmp_path / 'bin' / 'python3', 'case "$*" in -c*) exit 0;; *) exit 1;; esac')
        done = run()
        assert done.returncode == 1
        assert 'install the package python3-venv' in done.stderr

    @pytest.mark.parametrize('kind', ['venv', 'conda'])
    def test_active_environment_is_used(self, run, tmp_path, kind):
        (tmp_path / 'mine' / 'bin').mkdir(parents=True)
        python = script(tmp_path / 'mine' / 'bin' / 'python', self.PYTHON.format(fits=0))
        done = run(
            **{'VIRTUAL_ENV': str(tmp_path / 'mine')}
            if kind == 'venv'
            else {'CONDA_PREFIX': str(tmp_path / 'mine'), 'CONDA_DEFAULT_ENV': 'mine'}
        )
        assert done.stdout.startswith(f'{python}: tools/install.py --tests\n')
        assert not (tmp_path / '.venv').exists()

    @pytest.mark.parametrize('failing', ['', '.venv', '.venv-onedl'])
    def test_ci_gives_each_stack_its_environment(self, run, tmp_path, failing):
        """Even where one is active, and a failure of either is CI's."""
        fails = f'\ncase "$0 $2" in *{failing}/bin/python\\ pytest) exit 5 ;; esac'
        text = self.PYTHON.format(fits=0) + (fails if failing else '')
        script(tmp_path / 'bin' / 'python3.11', text)
        for name in ('ruff', 'shellcheck'):
            script(tmp_path / 'bin' / name, f'echo {name}: "$@"')
        active = {'VIRTUAL_ENV': str(tmp_path / 'mine'), 'MMSTEPNET_STACK': 'onedl'}
        done = run(file='.ci/run', **active)
        upstream, onedl = (tmp_path / name / 'bin' / 'python' for name in ('.venv', '.venv-onedl'))
        expected = [
            f'Making {upstream.parents[1]} with {tmp_path}/bin/python3.11',
            f'{upstream}: tools/install.py --tests',
            'ruff: check .',
            'ruff: format --check .',
            'shellcheck: -x tools/run_tests.sh tools/setup_env.sh .ci/run',
            f'{upstream}: tools/install.py --tests',
            f'{upstream}: -m pytest --durations 15',
            f'Making {onedl.parents[1]} with {tmp_path}/bin/python3.11',
            f'{onedl}: tools/install.py --tests',
            f'{onedl}: -m pytest -m not slow -m smoke -n 2 --durations 15',
        ]
        assert done.stdout.splitlines() == (expected[:7] if failing == '.venv' else expected)
        assert done.returncode == (5 if failing else 0)

    def test_failed_installation_ends_the_run(self, run, tmp_path):
        (tmp_path / 'mine' / 'bin').mkdir(parents=True)
        script(tmp_path / 'mine' / 'bin' / 'python', 'echo "$1"; exit 7')
        done = run(VIRTUAL_ENV=str(tmp_path / 'mine'))
        assert (done.returncode, done.stdout) == (7, 'tools/install.py\n')
