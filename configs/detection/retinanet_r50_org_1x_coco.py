_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)

model = dict(backbone=dict(type='mmstepnet.StepResNet'))
