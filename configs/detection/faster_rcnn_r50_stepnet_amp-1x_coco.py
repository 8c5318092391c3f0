# Mixed precision; train.py --amp does the same for any config.
_base_ = './faster_rcnn_r50_stepnet_1x_coco.py'

optim_wrapper = dict(type='AmpOptimWrapper')
