"""Child registries of MMEngine's, scope ``mmstepnet``.

A module registered here is built from any MMEngine config as ``dict(type='mmstepnet.NAME')``. The
``locations`` are imported at the first look-up, so that importing this file costs nothing but
MMEngine.
"""

from mmengine import registry as root

MODELS = root.Registry('model', parent=root.MODELS, locations=['mmstepnet.models'])
HOOKS = root.Registry('hook', parent=root.HOOKS, locations=['mmstepnet.engine.hooks'])
METRICS = root.Registry('metric', parent=root.METRICS, locations=['mmstepnet.evaluation.metrics'])
DATASETS = root.Registry('dataset', parent=root.DATASETS, locations=['mmstepnet.datasets'])
TRANSFORMS = root.Registry('transform', parent=root.TRANSFORMS, locations=['mmstepnet.datasets'])
VISUALIZERS = root.Registry(
    'visualizer', parent=root.VISUALIZERS, locations=['mmstepnet.visualization']
)
RUNNERS = root.Registry(
    'runner',
    parent=root.RUNNERS,
    build_func=root.build_runner_from_cfg,
    locations=['mmstepnet.engine.runner'],
)
FUNCTIONS = root.Registry('function', parent=root.FUNCTIONS, locations=['mmstepnet.engine.hooks'])
