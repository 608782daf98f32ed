/* A C program with the static library in it: prints what is registered there, registers a backend by
 * a call (twice, which must fail), and prints again. With a path as argument it then prints what is
 * registered in the dynamic library at that path, and once more what is registered here. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

void print_backends(void);
bool register_called(void);

int main(int argc, char **argv) {
    print_backends();
    bool first = register_called();
    if (!first || register_called()) {
        return 1;
    }
    print_backends();
    if (argc < 2) {
        return 0;
    }
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    void (*print_there)(void) = (void (*)(void))dlsym(library, "print_backends");
    if (!print_there) {
        return 3;
    }
    print_there();
    print_backends();
    return 0;
}
