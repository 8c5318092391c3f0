# The same under the name that the tables use.
_base_ = '../faster_rcnn_r50_stepnet_coco.py'
