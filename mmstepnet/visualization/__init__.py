from .attention_figures import (
    attention_maps_figure,
    center_paths_figure,
    depth_figure,
    diffusion_figure,
    head_figure,
    training_curves_figure,
)
from .comparison_figures import (
    accuracy_figure,
    comparison_figures,
    group_by_model,
    runs_figure,
    save_comparison_figures,
    tns_figure,
)
from .figures import figure_to_image, save_figure
from .stiffness_figures import (
    delta_figure,
    nsi_figure,
    nsi_step_size_figure,
    proportion_figure,
    save_stiffness_figures,
    step_size_figure,
    stiffness_figures,
)

__all__ = [
    'accuracy_figure',
    'attention_maps_figure',
    'center_paths_figure',
    'comparison_figures',
    'delta_figure',
    'depth_figure',
    'diffusion_figure',
    'figure_to_image',
    'group_by_model',
    'head_figure',
    'nsi_figure',
    'nsi_step_size_figure',
    'proportion_figure',
    'runs_figure',
    'save_comparison_figures',
    'save_figure',
    'save_stiffness_figures',
    'step_size_figure',
    'stiffness_figures',
    'tns_figure',
    'training_curves_figure',
]
