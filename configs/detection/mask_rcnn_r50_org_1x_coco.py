_base_ = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)

model = dict(backbone=dict(type='mmstepnet.StepResNet'))
