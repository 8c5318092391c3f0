"""What an installed package holds: a wheel and an editable install."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
from mmengine.hub import get_config
import mmstepnet
config = get_config('mmstepnet::digits/faster_rcnn_r18_stepnet_digits.py')
assert config.model.backbone.type == 'mmstepnet.StepResNet'
print(mmstepnet.__file__)
print(config.filename)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """A copy of what the distribution is built from: builds leave files beside their source."""
    folder = tmp_path_factory.mktemp('source')
    for name in ('setup.py', 'pyproject.toml', 'MANIFEST.in', 'model-index.yml', 'LICENSE'):
        shutil.copy(ROOT / name, folder)
    for name in ('README.md', 'requirements.txt', 'CITATION.cff', 'CHANGELOG.md'):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
    for name in ('requirements', 'configs', 'tools', 'mmstepnet'):
        ignore = shutil.ignore_patterns('.mim', '__pycache__')
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


@pytest.fixture
def environment(tmp_path):
    """Python of a new environment that sees this one's packages, but not an editable mmstepnet."""
    folder = tmp_path / 'environment'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    site = next(folder.glob('lib/python*/site-packages'))
    here = [path for path in sys.path if path.endswith('site-packages')]
    (site / 'outer.pth').write_text('\n'.join(here) + '\n')
    return folder / 'bin' / 'python'


def pip(*arguments):
    command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def use(python, cwd):
    """Loads a config by ``mmstepnet::`` there; returns the package's and the config's files."""
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run(
        [python, '-c', USE], capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()[-2:]]


def expected_items():
    files = [ROOT / 'model-index.yml']
    for folder in ('configs', 'tools'):
        files += [path for path in (ROOT / folder).rglob('*') if path.is_file()]
    return {
        f'mmstepnet/.mim/{path.relative_to(ROOT).as_posix()}'
        for path in files
        if path.suffix != '.pyc'
    }


@pytest.mark.parametrize('through_sdist', [False, True])
def test_wheel(source, environment, tmp_path, through_sdist):
    origin = source
    if through_sdist:
        code = 'from setuptools.build_meta import build_sdist; print(build_sdist("dist"))'
        done = subprocess.run(
            [sys.executable, '-c', code], cwd=source, capture_output=True, text=True, check=True
        )
        origin = source / 'dist' / done.stdout.splitlines()[-1]
    pip('wheel', '--no-deps', '--no-build-isolation', '--wheel-dir', tmp_path, origin)
    (wheel,) = tmp_path.glob('mmstepnet-*.whl')
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith('/METADATA'))).decode()
    assert {name for name in names if name.startswith('mmstepnet/.mim/')} == expected_items()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'mmstepnet').rglob('*.py')}
    assert {name for name in names if name.endswith('.py') and '/.mim/' not in name} == {
        name for name in modules if '/.mim/' not in name
    }
    required = [line for line in metadata.splitlines() if line.startswith('Requires-Dist: ')]
    assert any('torch>=' in line for line in required)
    assert not [line for line in required if 'mm' in line and 'extra ==' not in line]

    site = next(environment.parents[1].glob('lib/python*/site-packages'))
    pip('install', '--no-deps', '--target', site, wheel)
    package, config = use(environment, tmp_path)
    assert package.is_relative_to(site)
    assert config.is_relative_to(site / 'mmstepnet' / '.mim' / 'configs')


def test_editable(source, environment, tmp_path):
    site = next(environment.parents[1].glob('lib/python*/site-packages'))
    pip(
        '--python',
        environment,
        'install',
        '--no-deps',
        '--no-build-isolation',
        '--editable',
        source,
    )
    assert list(site.glob('mmstepnet-*.dist-info'))
    package, config = use(environment, tmp_path)
    assert package == source / 'mmstepnet' / '__init__.py'
    links = source / 'mmstepnet' / '.mim'
    assert config.resolve() == source / 'configs/digits/faster_rcnn_r18_stepnet_digits.py'
    assert sorted(path.name for path in links.iterdir()) == ['configs', 'model-index.yml', 'tools']
    assert all(path.is_symlink() for path in links.iterdir())
