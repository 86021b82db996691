#include "support/cunit_suite.h"
int main(void) { return 0; }
