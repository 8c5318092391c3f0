# Own reading of the adaptors that the paper shows in a figure only, see docs/fidelity.md.
_base_ = './resnet164_org_164e_stl10.py'

model = dict(
    backbone=dict(
        plugins=[dict(cfg=dict(type='mmstepnet.StepNetAblation', variant='d'), blocks='identity')]
    )
)
