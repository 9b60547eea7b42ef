#include "bindings.h"

PYBIND11_MODULE(_C, m) {
#ifdef MAXRL_FAST_CUDA
  m.attr("cuda") = true;
#else
  m.attr("cuda") = false;
#endif
  m.attr("FIELDS") = pybind11::dict();
  maxrl::bindings::bind_attention(m);
  maxrl::bindings::bind_group_advantage(m);
  maxrl::bindings::bind_token_loss(m);
  maxrl::bindings::bind_pacs(m);
  maxrl::bindings::bind_generation(m);
  maxrl::bindings::bind_decoding(m);
  maxrl::bindings::bind_layer(m);
}
