# Maps keep their channels last in memory, which convolutions on tensor cores work with.
_base_ = './faster_rcnn_r50_stepnet_1x_coco.py'

runner_type = 'mmstepnet.ChannelsLastRunner'
