"""Mask R-CNN with FPN on COCO-2017, 1x: MMDetection's own configuration with the file beside this one as its backbone.

    mim train mmdet mask_rcnn.py                  # data in data/coco; several GPUs: --gpus 8 --launcher pytorch
"""
{% if mmdet.class == "SwinTransformer" %}
_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
{% else %}
_base_ = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
{% endif %}

model = dict(
    data_preprocessor=dict(mean={{ mean255 }}, std={{ std255 }}, bgr_to_rgb=True),
    backbone=dict(
{% if mmdet.class == "SwinTransformer" %}
        embed_dims={{ mmdet.embed_dims }}, depths={{ mmdet.depths }}, num_heads={{ mmdet.num_heads }}, window_size={{ mmdet.window_size }},
        drop_path_rate={{ mmdet.drop_path_rate }}, convert_weights=False,
{% else %}
        depth={{ mmdet.depth }}, frozen_stages=1, norm_eval=True, style='pytorch',
{% endif %}
        init_cfg=dict(_delete_=True, type='Pretrained', checkpoint='{{ "{{ fileDirname }}" }}/{{ file }}')),
    neck=dict(in_channels={{ channels }}))
