"""The numbers of the tables in *Understanding Self-attention Mechanism via Dynamical System
Perspective* (ICCV 2023, https://arxiv.org/abs/2308.09939), to stand beside one's own.

Accuracies are top-1 in percent, mean and standard deviation over five seeds; parameters are in
millions. ``NAME[method][column]``, with methods as config files name them.
"""

# Table 1, ResNet-164: parameters and accuracy.
TABLE1 = {
    'org': {
        'cifar10': dict(parameters=1.70, accuracy=(93.35, 0.18)),
        'cifar100': dict(parameters=1.73, accuracy=(74.3, 0.3)),
        'stl10': dict(parameters=1.70, accuracy=(82.66, 1.05)),
    },
    'se': {
        'cifar10': dict(parameters=1.91, accuracy=(94.26, 0.14)),
        'cifar100': dict(parameters=1.93, accuracy=(75.25, 0.31)),
        'stl10': dict(parameters=1.91, accuracy=(83.96, 0.92)),
    },
    'cbam': {
        'cifar10': dict(parameters=1.92, accuracy=(93.91, 0.14)),
        'cifar100': dict(parameters=1.94, accuracy=(74.68, 0.22)),
        'stl10': dict(parameters=1.92, accuracy=(84.11, 0.49)),
    },
    'eca': {
        'cifar10': dict(parameters=1.70, accuracy=(94.15, 0.23)),
        'cifar100': dict(parameters=1.73, accuracy=(74.41, 0.27)),
        'stl10': dict(parameters=1.70, accuracy=(83.89, 1.21)),
    },
    'sem': {
        'cifar10': dict(parameters=1.95, accuracy=(94.52, 0.11)),
        'cifar100': dict(parameters=1.97, accuracy=(76.49, 0.26)),
        'stl10': dict(parameters=1.95, accuracy=(85.73, 0.16)),
    },
    'srm': {
        'cifar10': dict(parameters=1.74, accuracy=(94.59, 0.12)),
        'cifar100': dict(parameters=1.76, accuracy=(75.49, 0.31)),
        'stl10': dict(parameters=1.74, accuracy=(84.73, 0.12)),
    },
    'fca': {
        'cifar10': dict(parameters=1.91, accuracy=(94.66, 0.12)),
        'cifar100': dict(parameters=1.93, accuracy=(76.52, 0.19)),
        'stl10': dict(parameters=1.91, accuracy=(85.34, 0.25)),
    },
    'iebn': {
        'cifar10': dict(parameters=1.73, accuracy=(94.7, 0.13)),
        'cifar100': dict(parameters=1.75, accuracy=(76.32, 0.14)),
        'stl10': dict(parameters=1.73, accuracy=(85.13, 0.04)),
    },
    'stepnet': {
        'cifar10': dict(parameters=1.75, accuracy=(95.14, 0.24)),
        'cifar100': dict(parameters=1.77, accuracy=(77.04, 0.22)),
        'stl10': dict(parameters=1.75, accuracy=(86.08, 0.11)),
    },
}

# Table 2, ImageNet.
TABLE2 = {
    'org': {'resnet34': dict(accuracy=(73.99, 0.04)), 'resnet50': dict(accuracy=(76.02, 0.09))},
    'se': {'resnet34': dict(accuracy=(74.37, 0.1)), 'resnet50': dict(accuracy=(76.62, 0.02))},
    'eca': {'resnet34': dict(accuracy=(74.56, 0.08)), 'resnet50': dict(accuracy=(77.07, 0.09))},
    'cbam': {'resnet34': dict(accuracy=(74.89, 0.11)), 'resnet50': dict(accuracy=(76.38, 0.1))},
    'srm': {'resnet34': dict(accuracy=(74.79, 0.04)), 'resnet50': dict(accuracy=(76.49, 0.03))},
    'fca': {'resnet34': dict(accuracy=(75.08, 0.19)), 'resnet50': dict(accuracy=(77.22, 0.15))},
    'sge': {'resnet34': dict(accuracy=(74.5, 0.03)), 'resnet50': dict(accuracy=(77.13, 0.06))},
    'stepnet': {'resnet34': dict(accuracy=(75.01, 0.09)), 'resnet50': dict(accuracy=(77.52, 0.04))},
}

# Table 3, COCO, Faster R-CNN: AP, AP50, AP75 and AP of small, medium and large objects.
TABLE3 = {
    'org': {
        'r50': dict(ap=(36.9, 57.5, 39.4, 22.1, 39.6, 46.4)),
        'r101': dict(ap=(38.9, 60.3, 41.4, 22.1, 43.9, 50.0)),
    },
    'se': {
        'r50': dict(ap=(38.3, 60.1, 41.5, 23.0, 42.1, 49.2)),
        'r101': dict(ap=(39.8, 61.2, 43.4, 23.6, 44.2, 51.1)),
    },
    'eca': {
        'r50': dict(ap=(38.5, 60.4, 41.5, 23.2, 42.2, 48.9)),
        'r101': dict(ap=(40.4, 62.7, 44.5, 24.1, 45.1, 51.8)),
    },
    'sge': {
        'r50': dict(ap=(38.9, 60.0, 42.0, 23.2, 41.9, 49.0)),
        'r101': dict(ap=(40.2, 61.4, 43.2, 24.1, 44.5, 51.2)),
    },
    'stepnet': {
        'r50': dict(ap=(39.8, 61.2, 41.9, 23.8, 43.1, 51.0)),
        'r101': dict(ap=(41.9, 62.6, 44.4, 25.4, 46.8, 53.2)),
    },
}

# Table 4, ResNet-164: what the adaptor sees, and other adaptors.
TABLE4 = {
    'org': {
        'cifar10': dict(accuracy=(93.35, 0.18)),
        'cifar100': dict(accuracy=(74.3, 0.3)),
        'stl10': dict(accuracy=(82.66, 1.05)),
    },
    'stepnet-current': {
        'cifar10': dict(accuracy=(94.59, 0.14)),
        'cifar100': dict(accuracy=(76.34, 0.14)),
        'stl10': dict(accuracy=(84.74, 0.64)),
    },
    'stepnet-next': {
        'cifar10': dict(accuracy=(94.32, 0.23)),
        'cifar100': dict(accuracy=(76.53, 0.04)),
        'stl10': dict(accuracy=(85.12, 0.54)),
    },
    'stepnet-difference': {
        'cifar10': dict(accuracy=(94.69, 0.33)),
        'cifar100': dict(accuracy=(76.42, 0.1)),
        'stl10': dict(accuracy=(85.26, 0.72)),
    },
    'stepnet': {
        'cifar10': dict(accuracy=(95.14, 0.24)),
        'cifar100': dict(accuracy=(77.04, 0.22)),
        'stl10': dict(accuracy=(86.08, 0.11)),
    },
    'stepnet-a': {
        'cifar10': dict(accuracy=(94.39, 0.12)),
        'cifar100': dict(accuracy=(76.19, 0.14)),
        'stl10': dict(accuracy=(84.21, 0.12)),
    },
    'stepnet-b': {
        'cifar10': dict(accuracy=(94.05, 0.11)),
        'cifar100': dict(accuracy=(75.45, 0.12)),
        'stl10': dict(accuracy=(84.1, 0.24)),
    },
    'stepnet-c': {
        'cifar10': dict(accuracy=(94.19, 0.24)),
        'cifar100': dict(accuracy=(75.12, 0.08)),
        'stl10': dict(accuracy=(84.12, 0.44)),
    },
    'stepnet-d': {
        'cifar10': dict(accuracy=(94.92, 0.24)),
        'cifar100': dict(accuracy=(76.83, 0.14)),
        'stl10': dict(accuracy=(85.62, 0.44)),
    },
}

# Appendix G, transformers trained from scratch.
VIT = {
    'org': {
        'cifar10': dict(accuracy=(89.08, 0.84)),
        'cifar100': dict(accuracy=(66.32, 1.03)),
        'stl10': dict(accuracy=(62.58, 1.02)),
    },
    'stepnet': {
        'cifar10': dict(accuracy=(90.32, 0.48)),
        'cifar100': dict(accuracy=(68.88, 0.25)),
        'stl10': dict(accuracy=(65.58, 0.59)),
    },
}
