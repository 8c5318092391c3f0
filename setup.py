"""Build of the package, with the ``.mim`` folder that MIM and ``mmstepnet::`` configs look into."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MIM_ITEMS = ('configs', 'tools', 'model-index.yml')


class BuildWithMim(build_py):
    """Puts configs, tools and the model index into ``mmstepnet/.mim``.

    A wheel gets copies. An editable install gets links in the source tree, so that an edited config
    is the one that runs.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            self.link_mim(ROOT / 'mmstepnet' / '.mim')
        else:
            self.copy_mim(Path(self.build_lib) / 'mmstepnet' / '.mim')

    @staticmethod
    def link_mim(mim):
        shutil.rmtree(mim, ignore_errors=True)
        mim.mkdir()
        for item in MIM_ITEMS:
            (mim / item).symlink_to(Path('..', '..', item))

    @staticmethod
    def copy_mim(mim):
        shutil.rmtree(mim, ignore_errors=True)
        mim.mkdir(parents=True)
        for item in MIM_ITEMS:
            if (ROOT / item).is_dir():
                shutil.copytree(
                    ROOT / item,
                    mim / item,
                    ignore=shutil.ignore_patterns('__pycache__', '*.py[cod]'),
                )
            else:
                shutil.copy(ROOT / item, mim / item)


def read_version():
    scope = {}
    exec((ROOT / 'mmstepnet' / 'version.py').read_text(encoding='utf-8'), scope)
    return scope['__version__']


def read_requirements(name):
    lines = (ROOT / 'requirements' / name).read_text(encoding='utf-8').splitlines()
    return [line for line in lines if line and not line.startswith('#')]


def read_readme():
    path = ROOT / 'README.md'
    return path.read_text(encoding='utf-8') if path.is_file() else ''


setup(
    name='mmstepnet',
    version=read_version(),
    description='Attention as a learned step size: StepNet and network stiffness for OpenMMLab',
    long_description=read_readme(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords='computer vision, object detection, attention, neural network stiffness',
    packages=find_packages(include=['mmstepnet', 'mmstepnet.*']),
    python_requires='>=3.10',
    # No mm* here: the forks of the OpenMMLab packages install the same modules under other
    # distribution names, and a requirement by name would pull the upstream ones in on top.
    install_requires=read_requirements('runtime.txt'),
    extras_require={
        'mim': read_requirements('mminstall.txt'),
        'tests': read_requirements('tests.txt'),
    },
    cmdclass={'build_py': BuildWithMim},
    zip_safe=False,
    classifiers=[
        'Development Status :: 4 - Beta',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
