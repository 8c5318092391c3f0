_base_ = './resnet164_stepnet_164e_cifar100.py'

loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
model = dict(head=dict(loss=loss))
