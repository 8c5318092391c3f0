_base_ = './resnet50_org_120e_imagenet.py'

model = dict(backbone=dict(depth=34), head=dict(in_channels=512))
