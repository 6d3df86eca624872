"""The scripts.

An installed package holds them in this folder; in a checkout they lie in its root, beside the
package.
"""

from yolo_seg_ddp.utils.environment import SCRIPTS_FOLDER

__path__ = [str(SCRIPTS_FOLDER)]
