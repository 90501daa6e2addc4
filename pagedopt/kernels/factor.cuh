// The C++ side of launch/on_device.py: by what a step multiplies gradients, and whether it is taken at all. It lies on the
// device, and is written before the kernels of the step.

struct Factor {
    double coefficient;  // of clipping; 1: gradients are not clipped
    double max_norm;     // to which gradients are clipped
    double norm;         // of all gradients, divided by the scale
    float scale;         // of the loss; gradients are divided by it
    float found_inf;     // not 0: a scaler has found a gradient that is infinite or NaN
    float skips;         // not 0: a step whose norm is not finite is left out
    float nonfinite;     // not 0: this is one
    double skipped;      // how many there were
    __device__ bool leaves_out() const { return found_inf != 0 || nonfinite != 0; }  // then the step changes nothing
};
