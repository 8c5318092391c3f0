_base_ = './faster_rcnn_r50_stepnet_channels-last-1x_coco.py'

optim_wrapper = dict(type='AmpOptimWrapper')
