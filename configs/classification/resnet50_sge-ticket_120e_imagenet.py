# A lottery ticket: SGE in 9 of the 16 blocks.
_base_ = './resnet50_org_120e_imagenet.py'

ticket = [[1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0, 1, 1], [0, 1, 1]]
model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.SGE'), blocks=ticket)]))
