"""Installs the pinned stack and this package into the environment whose Python runs it.

Standard library alone. ``tools/setup_env.sh`` starts it with the right Python; finished steps are
skipped, so that it can be started again at any time.

Environment variables:
    MMSTEPNET_STACK: ``upstream`` (default) or ``onedl``, the maintained forks.
    MMSTEPNET_TORCH: Arguments for pip that choose another torch build, for example
        ``torch==2.11.0 torchvision==0.26.0 --index-url URL``.
    MAX_JOBS: How many files are compiled at a time.
    FORCE_CUDA: ``1`` compiles mmcv's CUDA ops on a machine that has nvcc but no GPU.
"""

import argparse
import contextlib
import fcntl
import importlib
import importlib.metadata
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / 'work_dirs' / 'install'
COMPAT = runpy.run_path(str(ROOT / 'mmstepnet' / 'utils' / 'compat.py'))
STACKS = {'upstream': 'mminstall.txt', 'onedl': 'mminstall_onedl.txt'}
PIP = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--no-input']
SETUPTOOLS = 'setuptools==80.9.0'
GIB = 1024**3

# What comes out where a command fails, and what to do about it. The first match counts.
REASONS = [
    (r'No space left on device', 'The disk is full.'),
    (
        r'NewConnectionError|Name or service not known|Temporary failure in name resolution|'
        r'ConnectTimeout|ReadTimeout|ProxyError|Network is unreachable|Max retries exceeded',
        "The package registry cannot be reached. Check the network and pip's settings.",
    ),
    (
        r'Killed signal terminated program|internal compiler error|virtual memory exhausted',
        'The compiler ran out of memory. Run it again with MAX_JOBS=1.',
    ),
    (r'Permission denied', 'The environment cannot be written to.'),
    (
        r'No matching distribution found|Could not find a version',
        'The package registry does not have that version for this Python.',
    ),
]


class InstallError(Exception):
    """The installation cannot go on; the message is for the user."""


# What is there already


def requirement_lines(name):
    """The requirements of a file under ``requirements/``, without comments."""
    lines = (ROOT / 'requirements' / name).read_text(encoding='utf-8').splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith('#')]


def distribution_version(name):
    """Version of an installed distribution, or None."""
    importlib.invalidate_caches()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_satisfied(requirement):
    """Whether the environment has what one line of our requirement files asks for."""
    name, conditions = re.fullmatch(r'([\w.-]+?)((?:[=<>]=?[\d.]+,?)*)', requirement).groups()
    version = distribution_version(name)
    if version is None:
        return False
    release = COMPAT['release']
    holds = {
        '==': lambda a, b: a == b,
        '>=': lambda a, b: a >= b,
        '<': lambda a, b: a < b,
    }
    return all(
        holds[operator](release(version), release(bound))
        for operator, bound in re.findall(r'([=<>]=?)([\d.]+)', conditions)
    )


def missing(requirements):
    return [requirement for requirement in requirements if not is_satisfied(requirement)]


def in_range(version, module):
    """Whether a version lies in the supported range of its module."""
    floor, ceiling, _ = COMPAT['SUPPORTED'][module]
    release = COMPAT['release']
    return release(floor) <= release(version) < release(ceiling)


def run_python(code, env=None):
    """Runs code in a new interpreter. Returns its output, or raises with its last line."""
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, env=env, cwd=sys.prefix
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f'exit status {done.returncode}']
        raise InstallError(lines[-1])
    return done.stdout.strip()


def works(code):
    """Why the code fails in a new interpreter; an empty string where it does not."""
    try:
        run_python(code)
    except InstallError as error:
        return str(error)
    return ''


def choose_stack():
    """The stack that is asked for, or the one that the environment already holds.

    Raises:
        InstallError: ``MMSTEPNET_STACK`` is unknown, or the environment holds the other stack,
            whose modules have the same names.
    """
    held = [
        stack
        for stack, name in (('upstream', 'mmengine'), ('onedl', 'onedl-mmengine'))
        if distribution_version(name)
    ]
    asked = os.environ.get('MMSTEPNET_STACK') or (held[0] if held else 'upstream')
    if asked not in STACKS:
        raise InstallError(f'MMSTEPNET_STACK must be one of {", ".join(STACKS)}, got {asked!r}.')
    if held and held != [asked]:
        raise InstallError(
            f'{sys.prefix} holds the {" and the ".join(held)} stack, whose modules have the same '
            f'names as those of {asked}. Use another environment; if none is active, one is made.'
        )
    return asked


# What the machine must have


def check_python():
    version = sys.version_info
    if not (3, 10) <= version[:2] <= (3, 12) or sys.maxsize < 2**32:
        raise InstallError(
            f'Python 3.10, 3.11 or 3.12 (64 bit) is needed, {sys.executable} is '
            f'{version.major}.{version.minor}. Name another one: PYTHON=/path/to/python3.11'
        )


def check_compiler():
    """A C++17 compiler and Python's headers, which mmcv's ops are compiled with."""
    header = Path(sysconfig.get_paths()['include'], 'Python.h')
    if not header.is_file():
        name = f'python{sys.version_info.major}.{sys.version_info.minor}'
        raise InstallError(
            f'{header} is missing; mmcv is compiled against it. Install {name}-dev (Debian, '
            f'Ubuntu) or {name}-devel (Fedora), or name another Python: PYTHON=/path/to/python'
        )
    compiler = shlex.split(os.environ.get('CXX') or 'c++')
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, 'probe.cpp')
        source.write_text('#include <optional>\nint main() { return *std::optional<int>(0); }\n')
        command = [*compiler, '-std=c++17', '-c', str(source), '-o', str(source.with_suffix('.o'))]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            raise InstallError(
                f'No C++ compiler: {compiler[0]!r} cannot be run; mmcv is compiled by it. Install '
                'g++ (Debian, Ubuntu: build-essential), or name another one: CXX=/path/to/c++'
            ) from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ['no message']
        raise InstallError(
            f'The C++ compiler {shlex.join(compiler)} cannot compile C++17: {lines[0]}'
        )


def check_disk(needed):
    """Room for the environment and for what pip unpacks on the way.

    Args:
        needed (float): GiB that the environment will grow by.
    """
    places = {}
    for folder, amount in ((sys.prefix, needed), (tempfile.gettempdir(), 0.5 * needed)):
        device = os.stat(folder).st_dev
        first, total = places.get(device, (folder, 0))
        places[device] = (first, total + amount)
    for folder, amount in places.values():
        free = shutil.disk_usage(folder).free / GIB
        if free < amount:
            raise InstallError(
                f'Too little disk space: {folder} has {free:.1f} GiB free, the installation needs '
                f'{amount:.1f} GiB.'
            )


def check_registry():
    """pip can get a package, by whatever way it is set up to."""
    command = [*PIP, 'download', '--quiet', '--no-deps', '--no-cache-dir', '--retries', '0']
    with tempfile.TemporaryDirectory() as folder:
        command += ['--timeout', '20', '--dest', folder, SETUPTOOLS]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith('ERROR')]
        raise InstallError(
            "The package registry cannot be reached. Check the network and pip's settings "
            f'(pip config list). pip says: {(lines or ["nothing"])[0]}'
        )


# Doing it, and showing it


def clock(seconds):
    """Minutes and seconds, ``03:07``."""
    return f'{int(seconds) // 60:02d}:{int(seconds) % 60:02d}'


def about(minutes):
    """A duration in words for a forecast."""
    return f'about {max(1, round(minutes))} min' if minutes >= 0.75 else 'less than a minute'


class Progress:
    """Says which step runs, how far it is and how long everything takes from there.

    On a terminal the line is rewritten every second; in a log one is written every minute.

    Args:
        plan (list[tuple]): (title, minutes) of each step.
    """

    def __init__(self, plan, stream=None):
        self.plan = plan
        self.current = 0
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()

    def say(self, text):
        self.stream.write(('\r\x1b[K' if self.live else '') + text + '\n')
        self.stream.flush()

    def line(self, elapsed, counted=None, doing=''):
        """The live line.

        Args:
            elapsed (float): Seconds since the step began.
            counted (tuple | None): Files compiled and files in all.
            doing (str): What the command last said that it does.
        """
        title, minutes = self.plan[self.current]
        left = max(minutes - elapsed / 60, 0)
        if counted:
            done, total = counted
            doing = f'{done} of {total} files compiled'
            if done >= total / 10:
                left = elapsed / 60 * (total - done) / done
        rest = left + sum(minutes for _, minutes in self.plan[self.current + 1 :])
        forecast = f'{about(left)} left, {about(rest)} for everything'
        return f'  {title.split(" (")[0]} {clock(elapsed)} ({forecast}) {doing[:60]}'.rstrip()

    def run(self, command, env=None):
        """Runs a command with its output in a log file.

        Raises:
            InstallError: It failed. The message holds the reason, where it is a known one, or else
                the last lines of the output, and the log file's name.
        """
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f'{self.current + 1:02d}.log'
        state = {'counted': None, 'doing': '', 'tail': deque(maxlen=400)}
        with log.open('w', encoding='utf-8') as file:
            file.write(f'$ {shlex.join(command)}\n')
            # A session of its own: whatever a compiler starts ends with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors='replace',
                env=env,
                start_new_session=True,
            )
            reader = threading.Thread(target=self._read, args=(process, file, state), daemon=True)
            reader.start()
            try:
                self._wait(process, state)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                raise
            reader.join()
        if process.returncode:
            raise InstallError(self._explain(state['tail'], log, process.returncode))

    @staticmethod
    def _read(process, file, state):
        for line in process.stdout:
            file.write(line)
            file.flush()
            state['tail'].append(line.rstrip())
            if match := re.match(r'\s*\[(\d+)/(\d+)\] ', line):
                state['counted'] = (int(match[1]), int(match[2]))
            if match := re.match(r'\s*((Downloading|Building|Installing) \S+.*)', line):
                state['doing'] = match[1]

    def _wait(self, process, state):
        began = time.monotonic()
        next_line = began + (0 if self.live else 60)
        while True:
            try:
                process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if now >= next_line:
                text = self.line(now - began, state['counted'], state['doing'])
                if self.live:
                    width = shutil.get_terminal_size().columns - 1
                    self.stream.write('\r\x1b[K' + text[:width])
                    self.stream.flush()
                else:
                    self.say(text)
                next_line = now + (1 if self.live else 60)
        if self.live:
            self.stream.write('\r\x1b[K')

    @staticmethod
    def _explain(tail, log, status):
        text = '\n'.join(tail)
        for pattern, reason in REASONS:
            if match := re.search(f'.*(?:{pattern}).*', text):
                return f'{reason}\n    {match[0].strip()[:300]}\nThe whole output is in {log}'
        last = '\n'.join(f'    {line}' for line in list(tail)[-15:])
        return f'The command ended with status {status}:\n{last}\nThe whole output is in {log}'


# The steps


def pip_install(progress, *arguments, env=None):
    progress.run([*PIP, 'install', *arguments], env=env)


def constraints():
    """Arguments that keep pip from replacing what everything else is built against."""
    names = ('torch', 'torchvision', 'setuptools')
    lines = [f'{name}=={version}' for name in names if (version := distribution_version(name))]
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / 'constraints.txt'
    path.write_text('\n'.join(lines) + '\n')
    return ['--constraint', str(path)]


TORCH_CHOICE = Path(sys.prefix, 'mmstepnet-torch.txt')
TORCH_PROBE = (
    'import torch, torchvision; '
    'torchvision.ops.nms(torch.tensor([[0., 0., 1., 1.]]), torch.ones(1), 0.5)'
)
MMCV_PROBE = (
    'import torch, mmcv.ops; '
    'boxes = torch.tensor([[0., 0., 1., 1.]], device="{device}"); '
    'mmcv.ops.nms(boxes, boxes[:, 3], 0.5)'
)


def torch_mismatch(choice):
    """Why the installed torch is not the wanted one; an empty string where it is.

    Args:
        choice (str): pip's arguments for the build that the user wants, empty for any in range.
    """
    version = distribution_version('torch')
    if version is None:
        return 'not installed'
    if choice and (not TORCH_CHOICE.is_file() or TORCH_CHOICE.read_text() != choice):
        return f'wanted: {choice}'
    if not in_range(version, 'torch'):
        floor, ceiling, _ = COMPAT['SUPPORTED']['torch']
        return f'{version} is outside the supported range, {floor} up to (not including) {ceiling}'
    return ''


def torch_problem(choice):
    """Why the installed torch cannot stay; an empty string where it can."""
    return torch_mismatch(choice) or works(TORCH_PROBE)


def install_torch(progress, choice):
    if choice and distribution_version('torch'):
        # pip takes any build of the right version for the one that is wanted.
        progress.run([*PIP, 'uninstall', '--yes', 'torch', 'torchvision'])
    pip_install(progress, *shlex.split(choice or COMPAT['SUPPORTED']['torch'][2]))
    if choice:
        TORCH_CHOICE.write_text(choice)
    if problem := torch_problem(choice):
        raise InstallError(f'torch was installed, but cannot be used: {problem}')


def cuda_state():
    """Whether torch sees a GPU, and why CUDA ops cannot be compiled (empty where they can)."""
    code = (
        'import json, torch\n'
        'from torch.utils.cpp_extension import CUDA_HOME\n'
        'print(json.dumps([torch.cuda.is_available(), torch.version.cuda, CUDA_HOME]))'
    )
    gpu, torch_cuda, home = json.loads(run_python(code))
    if torch_cuda is None:
        return gpu, 'this torch is built without CUDA'
    nvcc = Path(home or '/nonexistent', 'bin', 'nvcc')
    if not nvcc.is_file():
        return gpu, f'nvcc is not installed (torch needs CUDA {torch_cuda})'
    text = subprocess.run([str(nvcc), '--version'], capture_output=True, text=True).stdout
    match = re.search(r'release (\d+)\.', text)
    if match is None or match[1] != torch_cuda.split('.')[0]:
        return gpu, f'{nvcc} does not match torch, which needs CUDA {torch_cuda}'
    return gpu, ''


def ops_on_gpu():
    """Whether mmcv's ops are to run on a GPU: there is one, and nvcc fits torch."""
    gpu, problem = cuda_state()
    return gpu and not problem


def mmcv_problem(requirement, cuda):
    """Why the installed mmcv cannot stay; an empty string where it can.

    Args:
        requirement (str): The line of the stack's requirement file.
        cuda (bool): Whether its ops must run on the GPU.
    """
    if not is_satisfied(requirement):
        return 'not installed'
    return works(MMCV_PROBE.format(device='cuda' if cuda else 'cpu'))


def compile_jobs():
    """How many files are compiled at a time: one a core, 2 GiB of memory each."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB
    return max(1, min(cores, int(memory / 2)))


def install_mmcv(progress, requirement):
    """Compiles mmcv against the torch that is there and tries its ops.

    pip may have a wheel in its cache from another torch; that one installs at once and fails at
    import, and is built anew.
    """
    cuda = ops_on_gpu()
    env = dict(os.environ)
    env.setdefault('MAX_JOBS', str(compile_jobs()))
    if not cuda and env.get('FORCE_CUDA') != '1':
        env['CUDA_VISIBLE_DEVICES'] = ''
    common = ['--verbose', '--no-build-isolation', *constraints()]
    pip_install(progress, *common, requirement, env=env)
    problem = mmcv_problem(requirement, cuda)
    if problem:
        progress.say(f'  the cached mmcv does not fit ({problem}); compiling it')
        name = requirement.split('==')[0]
        fresh = ['--no-cache-dir', '--force-reinstall', '--no-deps', '--no-binary', name]
        pip_install(progress, *common, *fresh, requirement, env=env)
        problem = mmcv_problem(requirement, cuda)
    if problem:
        raise InstallError(f'mmcv was compiled, but its ops do not work: {problem}')


def use_headless_opencv(progress):
    """Replaces opencv-python by its build that needs no libGL, which bare machines lack."""
    version = distribution_version('opencv-python')
    problem = works('import cv2')
    if not problem:
        return
    if version is None or '.so' not in problem:
        raise InstallError(f'OpenCV cannot be imported: {problem}')
    progress.say(f'  {problem}: using opencv-python-headless')
    progress.run([*PIP, 'uninstall', '--yes', 'opencv-python'])
    pip_install(progress, '--force-reinstall', '--no-deps', f'opencv-python-headless=={version}')


def install_libraries(progress, requirements):
    # No isolation: some sources are built by whatever setuptools is newest, and need an older one.
    pip_install(progress, '--no-build-isolation', *constraints(), *requirements)
    use_headless_opencv(progress)


def package_is_linked():
    """Whether this very checkout is what ``import mmstepnet`` finds."""
    try:
        distribution = importlib.metadata.distribution('mmstepnet')
    except importlib.metadata.PackageNotFoundError:
        return False
    origin = json.loads(distribution.read_text('direct_url.json') or '{}')
    version = runpy.run_path(str(ROOT / 'mmstepnet' / 'version.py'))['__version__']
    return (
        origin.get('url') == ROOT.as_uri()
        and bool(origin.get('dir_info', {}).get('editable'))
        and distribution.version == version
        and (ROOT / 'mmstepnet' / '.mim' / 'configs').is_dir()
    )


def install_package(progress):
    pip_install(progress, '--no-deps', '--no-build-isolation', '--editable', str(ROOT))


def verify():
    """Imports everything in a new interpreter and tries the compiled parts.

    Returns:
        tuple: The modules' versions as text, and whether mmcv has CUDA ops where there is a GPU.

    Raises:
        InstallError: Something does not work.
    """
    code = (
        'import json, mmengine, mmdet, mmpretrain, mmstepnet\n'
        f'{TORCH_PROBE}\n{MMCV_PROBE.format(device="cpu")}\n'
        'modules = (torch, torchvision, mmcv, mmengine, mmdet, mmpretrain, mmstepnet)\n'
        'text = ", ".join(f"{m.__name__} {m.__version__}" for m in modules)\n'
        'cuda_ops = mmcv.ops.get_compiling_cuda_version() != "not available"\n'
        'print(json.dumps([text, cuda_ops or not torch.cuda.is_available()]))'
    )
    return json.loads(run_python(code).splitlines()[-1])


class Wanted:
    """What the environment is to hold, and what of it is not there by name and version.

    Args:
        stack (str): A key of ``STACKS``.
        with_tests (bool): Whether what the tests need belongs to it.
    """

    def __init__(self, stack, with_tests):
        self.torch_choice = os.environ.get('MMSTEPNET_TORCH', '')
        *modules, self.mmcv = requirement_lines(STACKS[stack])
        libraries = requirement_lines('runtime.txt') + requirement_lines('tests.txt') * with_tests
        # torch has its own step, and its range stands in compat.py.
        libraries = [line for line in libraries if not line.startswith('torch')]
        self.tools = missing([SETUPTOOLS, 'wheel', 'ninja'])
        self.libraries = missing(libraries + modules)

    def is_there(self):
        """Whether nothing is missing by name and version; it may still not work."""
        return not (
            self.tools
            or self.libraries
            or torch_mismatch(self.torch_choice)
            or missing([self.mmcv])
            or not package_is_linked()
        )

    def steps(self):
        """What is left to do: (title, minutes, function of the progress)."""
        steps = []
        if self.tools:
            steps.append(('build tools', 0.3, lambda progress: pip_install(progress, *self.tools)))
        torch = torch_problem(self.torch_choice)
        if torch:
            steps.append(
                (f'torch ({torch})', 3, lambda progress: install_torch(progress, self.torch_choice))
            )
        if self.libraries:
            steps.append(
                ('libraries', 2, lambda progress: install_libraries(progress, self.libraries))
            )
        if torch or mmcv_problem(self.mmcv, ops_on_gpu()):
            minutes = 20 / compile_jobs()
            steps.append(
                ('mmcv with its ops', minutes, lambda progress: install_mmcv(progress, self.mmcv))
            )
        if not package_is_linked():
            steps.append(('mmstepnet', 0.2, install_package))
        return steps


def check_pip():
    """The environment has pip, which uv and ``venv --without-pip`` leave out.

    Raises:
        InstallError: It has not.
    """
    if works('import pip'):
        raise InstallError(
            f'{sys.executable} has no pip. Run: {shlex.quote(sys.executable)} -m ensurepip'
        )


def check_machine(titles):
    """Everything that would make a later step fail, before the first one starts."""
    check_pip()
    torch = any(title.startswith('torch') for title in titles)
    mmcv = any(title.startswith('mmcv') for title in titles)
    check_disk(8.0 if torch else 1.5 if mmcv else 0.5)
    if mmcv:
        check_compiler()
    if titles != ['mmstepnet']:
        check_registry()


def install(with_tests):
    """Brings the environment to the pinned state. Returns the modules' versions as text."""
    check_python()
    stack = choose_stack()
    wanted = Wanted(stack, with_tests)
    if wanted.is_there():
        with contextlib.suppress(InstallError):
            text, gpu_served = verify()
            if gpu_served:
                return text
    steps = wanted.steps()
    if steps:
        minutes = sum(minutes for _, minutes, _ in steps)
        print(f'Installing the {stack} stack into {sys.prefix}, {about(minutes)}.', flush=True)
        check_machine([title for title, _, _ in steps])
    progress = Progress([(title, minutes) for title, minutes, _ in steps])
    for number, (title, _, action) in enumerate(steps):
        progress.current = number
        progress.say(f'[{number + 1}/{len(steps)}] {title}')
        action(progress)
    text, gpu_served = verify()
    if not gpu_served:
        print(
            f'There is a GPU, but {cuda_state()[1]}: the ops of mmcv are compiled for the CPU, and '
            'detectors run there: set CUDA_VISIBLE_DEVICES= (to nothing) for every command, or '
            'install nvcc and start this again.'
        )
    return text


def main():
    parser = argparse.ArgumentParser(description='Install the pinned stack and mmstepnet.')
    parser.add_argument('--tests', action='store_true', help='what the tests need, too')
    with_tests = parser.parse_args().tests
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / 'lock').open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print('Another installation is running; waiting for it.', flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            print(f'Ready: {install(with_tests)}', flush=True)
        except InstallError as error:
            sys.exit(f'\nInstallation failed. {error}')
        except KeyboardInterrupt:
            print('\nInterrupted. Start it again to go on: finished steps are skipped.')
            sys.exit(130)


if __name__ == '__main__':
    main()
