"""The scripts of ``tools/`` as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / 'tools'


def load_tool(name: str) -> ModuleType:
    """Import a script, ``'train'`` or ``'analysis_tools/get_flops'``, anew."""
    # As for a script that is run, what lies beside it and beside the others can be imported.
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    path = TOOLS / f'{name}.py'
    spec = importlib.util.spec_from_file_location(f'tools_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
